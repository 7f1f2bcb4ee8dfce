"""Inside a transformers pipeline, which hands its keyword arguments on to `generate`."""

from transformers import pipeline

from hf_retrieval_assist import SamAssistant
from hf_retrieval_assist.tools.demo_model import load_demo_model

model, tokenizer = load_demo_model()
write = pipeline("text-generation", model=model, tokenizer=tokenizer)
assistant = SamAssistant()
for prompt in ("A recipe for pancakes:\n\n1.", "A recipe for waffles:\n\n1."):
    result = write(prompt, assistant=assistant, max_new_tokens=64, do_sample=False)
    print(result[0]["generated_text"], end="\n\n")
print(assistant.stats)
