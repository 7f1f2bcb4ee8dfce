"""Prompts with images: turns, batches and samples are those of plain decoding."""

import copy

import pytest
import torch
import transformers

from hf_retrieval_assist.host.transformers_private import CACHE
from tests.support.oracle_drafter import agreeing, oracle_assistant
from tests.support.quick import cases
from tests.support.tiny_models import tiny_config, tiny_model

IMAGE, VIDEO, START, END = 64, 65, 62, 63
# A text never speaks of images by their tokens.
OPTIONS = {"max_new_tokens": 14, "suppress_tokens": [IMAGE, VIDEO, START, END]}

QWEN = (
    transformers.Qwen2VLForConditionalGeneration,
    transformers.Qwen2_5_VLForConditionalGeneration,
    transformers.Qwen3VLForConditionalGeneration,
    transformers.Qwen3_5ForConditionalGeneration,
)
OTHERS = (
    transformers.LlavaForConditionalGeneration,
    transformers.Gemma3ForConditionalGeneration,
    transformers.Idefics3ForConditionalGeneration,
    transformers.InternVLForConditionalGeneration,
    transformers.PaliGemmaForConditionalGeneration,
)
TIERS = {
    transformers.Qwen3_5ForConditionalGeneration: "replay",
    # It counts positions from 1, but not in forwards.
    transformers.PaliGemmaForConditionalGeneration: "plain",
}


def pixels(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class QwenImages:
    """Models that number positions by an image's rows and columns."""

    grid = (1, 4, 6)
    tokens = 6  # patches are merged by fours

    def __init__(self, model_class):
        config = tiny_config(model_class.config_class)
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 4]}
        sizes = {"embed_dim": 16, "num_heads": 2, "num_position_embeddings": 64}
        sizes |= {"window_size": 32, "fullatt_block_indexes": [1]}
        sizes |= {"deepstack_visual_indexes": [0, 1]}
        vision = config.vision_config.to_dict()
        vision |= {name: value for name, value in sizes.items() if name in vision}
        self.patch = 3 * vision["temporal_patch_size"] * vision["patch_size"] ** 2
        text = config.text_config.to_dict() | {"rope_parameters": rope}
        ids = {"image_token_id": IMAGE, "video_token_id": VIDEO}
        ids |= {"vision_start_token_id": START, "vision_end_token_id": END}
        config = model_class.config_class(text_config=text, vision_config=vision, **ids)
        self.model = tiny_model(model_class, config)

    def image(self):
        return [START, *[IMAGE] * self.tokens, END]

    def extras(self, ids, seeds):
        return {
            "pixel_values": torch.cat([pixels(24, self.patch, seed=seed) for seed in seeds]),
            "image_grid_thw": torch.tensor([self.grid] * len(seeds)),
            **self.of_text(ids),
        }

    def of_text(self, ids):
        return {"mm_token_type_ids": (ids == IMAGE).int()}


class SquareImages:
    """Models that put each image's patches in a row."""

    def __init__(self, model_class):
        config = tiny_config(model_class.config_class)
        named = config.to_dict()
        names = ("image_token_index", "image_token_id")
        ours = {name: IMAGE for name in names if name in named}
        sizes = {"mm_tokens_per_image": 4, "scale_factor": 2, "downsample_ratio": 0.5}
        ours |= {name: value for name, value in sizes.items() if name in named}
        config = tiny_config(model_class.config_class, **ours)
        if hasattr(config.vision_config, "projection_dim"):
            config.vision_config.projection_dim = config.text_config.hidden_size
        self.model, self.name = tiny_model(model_class, config), model_class.__name__
        merged = any(name in ours for name in sizes)
        self.tokens = 4 if merged else 16

    def image(self):
        return [IMAGE] * self.tokens

    def extras(self, ids, seeds):
        images = torch.stack([pixels(3, 32, 32, seed=seed) for seed in seeds])
        if self.name == "Idefics3ForConditionalGeneration":
            images = images.view(len(ids), -1, 3, 32, 32)
        return {"pixel_values": images, **self.of_text(ids)}

    def of_text(self, ids):
        typed = "Gemma3ForConditionalGeneration", "PaliGemmaForConditionalGeneration"
        return {"token_type_ids": (ids == IMAGE).int()} if self.name in typed else {}


# Positions by rows and columns, a mask of its own for images, states that are replayed.
QUICK = [
    transformers.Qwen2VLForConditionalGeneration,
    transformers.Gemma3ForConditionalGeneration,
    transformers.Qwen3_5ForConditionalGeneration,
]


@pytest.fixture(
    scope="module", params=cases([*QWEN, *OTHERS], QUICK), ids=lambda kind: kind.__name__
)
def images(request):
    return (QwenImages if request.param in QWEN else SquareImages)(request.param)


def inputs_of(images, ids, seeds=(), mask=None):
    """A call's inputs; images are made from `seeds`."""
    mask = torch.ones_like(ids) if mask is None else mask
    extras = images.extras(ids, seeds) if seeds else images.of_text(ids)
    return {"input_ids": ids, "attention_mask": mask, **extras}


def generate(images, ids, seeds=(), **options):
    torch.manual_seed(0)
    return images.model.generate(
        **inputs_of(images, ids, seeds),
        return_dict_in_generate=True,
        **({"do_sample": False} | OPTIONS | options),
    )


def equal(images, ids, seeds=(), mask=None, **options):
    """Both results of a call, which agree; drafts were accepted, where the tier takes any, of one
    row if it is replayed."""
    options = {"do_sample": False, "return_dict_in_generate": True} | OPTIONS | options
    tier = TIERS.get(type(images.model), "tree")
    tier = "plain" if tier == "replay" and len(ids) > 1 else tier
    return agreeing(images.model, inputs_of(images, ids, seeds, mask), tier=tier, **options)


def prompt(images):
    return torch.tensor([[5, 9, *images.image(), 33, 21, 60]])


def test_a_batch_of_unequal_prompts(images):
    ids = torch.tensor([[5, 9, *images.image(), 33, 21, 60], [0, 0, 7, *images.image(), 12, 18]])
    equal(images, ids, [0, 1], (ids != 0).long())


def test_a_conversation(images):
    """A question that goes on from the cache of either kind of call, and another image."""
    plain, ours, _ = equal(images, prompt(images), [0], do_sample=True)
    other = generate(images, prompt(images), [1], do_sample=True)
    assert not torch.equal(plain.sequences, other.sequences)
    ids = torch.cat([plain.sequences, torch.tensor([[7, 44, 12]])], dim=1)
    second = generate(images, ids, **{CACHE: plain[CACHE]})
    kept = copy.deepcopy(ours[CACHE])
    for assistant in (None, oracle_assistant(second.sequences)):
        again = generate(images, ids, **{CACHE: kept}, assistant=assistant)
        assert torch.equal(second.sequences, again.sequences)
        kept = ours[CACHE]
    question = torch.tensor([[7, *images.image(), 44, 12]])
    equal(images, torch.cat([second.sequences, question], dim=1), [0, 1])


def test_many_calls_are_assisted_alike(images, tests):
    """What a forward leaves on the model, as how far positions are ahead of the text, is no
    setting, whatever its value."""
    assistant, tiers = oracle_assistant(prompt(images)), []
    for call in range(10):
        ids = torch.cat([prompt(images), torch.full((1, call), 7)], dim=1)
        seeds = [call] if call % 3 else []
        ids = ids if seeds else ids[:, -3 - call :]
        generate(images, ids, seeds, assistant=assistant, max_new_tokens=4)
        tiers.append(assistant.stats.last.tier)
    assert {*tiers} == {TIERS.get(type(images.model), "tree")}
    assert len(tests) <= 2


def test_layers_that_look_at_an_image_instead_of_the_text_are_decoded_plainly(told):
    """Their cache holds one entry for each part of the image."""
    config = tiny_config(transformers.MllamaConfig, image_token_index=66)
    config.text_config.cross_attention_layers = [1]
    vision = config.vision_config
    vision.max_num_tiles, vision.supported_aspect_ratios = 1, [[1, 1]]
    vision.intermediate_layers_indices, vision.vision_output_dim = [0], 2 * vision.hidden_size
    model = tiny_model(transformers.MllamaForConditionalGeneration, config)
    ids = torch.tensor([[66, 5, 9, 33, 21, 60, 7, 44, 5, 9]])
    ones = torch.ones((1, 1), dtype=torch.long)
    image = {"pixel_values": pixels(1, 1, 1, 3, 32, 32, seed=0), "aspect_ratio_ids": ones}
    image |= {"aspect_ratio_mask": ones[None]}
    seen = {"cross_attention_mask": torch.ones(1, 10, 1, 1, dtype=torch.long)}
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for inputs, reason in ((image | seen, "cross_attention_mask has an entry"), ({}, None)):
        agreeing(model, given | inputs, do_sample=False, max_new_tokens=6)
        assert reason is None or reason in told.text
