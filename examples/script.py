"""The smallest use: import an assistant, pass it to `generate`."""

from hf_retrieval_assist import SamAssistant
from hf_retrieval_assist.tools.demo_model import load_demo_model

model, tokenizer = load_demo_model()  # or any AutoModelForCausalLM and its tokenizer
assistant = SamAssistant()
inputs = tokenizer("The days of the week are Monday, Tuesday,", return_tensors="pt")
output = model.generate(**inputs, assistant=assistant, max_new_tokens=64, do_sample=False)
print(tokenizer.decode(output[0], skip_special_tokens=True))
print(assistant.stats)
