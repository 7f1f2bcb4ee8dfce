"""A conversation of several turns, printed as it is written.

Answers repeat what the conversation already holds, so later turns are drafted better. Answers end
where the model starts to write the user's next line.
"""

from transformers import TextStreamer

from hf_retrieval_assist import SamAssistant
from hf_retrieval_assist.demo_model import load_demo_model

QUESTIONS = (
    "List the planets of the solar system in order, one per line.",
    "List them again, in the reverse order.",
    "Which of them have rings?",
)


def main() -> None:
    model, tokenizer = load_demo_model()
    assistant = SamAssistant()
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    conversation = "A conversation between a user and a helpful assistant.\n\n"
    for question in QUESTIONS:
        print(f"\nUser: {question}\nAssistant:", end="")
        conversation += f"User: {question}\nAssistant:"
        inputs = tokenizer(conversation, return_tensors="pt")
        output = model.generate(
            **inputs,
            assistant=assistant,
            streamer=streamer,
            stop_strings="User:",
            tokenizer=tokenizer,
            max_new_tokens=96,
            do_sample=True,
            temperature=0.7,
        )
        answer = tokenizer.decode(output[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
        conversation += answer.removesuffix("User:").rstrip() + "\n"
        print(f"[{assistant.stats.last.mean_accepted_tokens:.2f} tokens per forward]")


if __name__ == "__main__":
    main()
