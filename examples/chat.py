"""A conversation of several turns, printed as it is written.

Answers repeat what the conversation already holds, so later turns are drafted better.
"""

from transformers import TextStreamer

from hf_retrieval_assist import SamAssistant
from hf_retrieval_assist.tools.demo_model import load_demo_model

QUESTIONS = (
    "List the planets of the solar system in order, one per line.",
    "List them again, in the reverse order.",
    "Which of them have rings?",
)


# For a base model, which has no template of its own.
TRANSCRIPT = """A conversation between a user and a helpful assistant.

{% for message in messages %}{{ message.role | title }}: {{ message.content }}
{% endfor %}Assistant:"""


def main() -> None:
    model, tokenizer = load_demo_model()
    tokenizer.chat_template = tokenizer.chat_template or TRANSCRIPT
    assistant = SamAssistant()
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    conversation: list[dict[str, str]] = []
    for question in QUESTIONS:
        print(f"\nUser: {question}\nAssistant:", end="")
        conversation.append({"role": "user", "content": question})
        inputs = tokenizer.apply_chat_template(
            conversation, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = model.generate(
            **inputs,
            assistant=assistant,
            streamer=streamer,
            stop_strings="User:",  # where a base model begins to write the next question
            tokenizer=tokenizer,
            max_new_tokens=96,
            do_sample=True,
            temperature=0.7,
        )
        answer = tokenizer.decode(
            output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
        answer = answer.removesuffix("User:").strip()
        conversation.append({"role": "assistant", "content": answer})
        print(f"[{assistant.stats.last.mean_accepted_tokens:.2f} tokens per forward]")


if __name__ == "__main__":
    main()
