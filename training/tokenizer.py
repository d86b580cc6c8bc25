"""The tiny pair's tokenizer: byte-level BPE in which every digit is a token of its own.

Prompt format (also the chat template): "<|begin_of_text|>Question: {question}\\nAnswer:"; the answer follows after one
space and ends with <|end_of_text|>. Encoding adds <|begin_of_text|> itself, so a prompt given as text leaves it out.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from training.problems import Problem, problems

VOCAB_SIZE = 1024
# Ids are the positions in this tuple.
SPECIAL_TOKENS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|pad|>",
    "<|end_of_turn|>",
    "<|MASK|>",
    "<|image|>",
    "<|video|>",
    "<|audio|>",
)
BOS, EOS, PAD, END_OF_TURN, MASK, IMAGE, VIDEO, AUDIO = range(len(SPECIAL_TOKENS))

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token }}"
    "{% else %}{{ 'Question: ' + message['content'] + '\\nAnswer:' }}{% endif %}"
    "{% endfor %}"
)


def format_prompt(question: str) -> str:
    """The prompt of one question, without <|begin_of_text|>, which encoding adds."""
    return f"Question: {question}\nAnswer:"


def train_tokenizer(seed: int, count: int = 20_000) -> Tokenizer:
    """Learns the merges from `count` training problems."""
    tokenizer = Tokenizer(models.BPE())
    # Digits first, so that no merge crosses or contains one; ByteLevel then keeps a leading space with its word.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (format_prompt(p.question) + " " + p.answer for p in problems("train", seed, count))
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{SPECIAL_TOKENS[BOS]} $A", special_tokens=[(SPECIAL_TOKENS[BOS], BOS)]
    )
    return tokenizer


def encode_problems(tokenizer: Tokenizer, items: Iterable[Problem]) -> tuple[list[list[int]], list[int]]:
    """Token ids of prompt, answer and end of text for every problem, and the length of each prompt."""
    items = list(items)
    prompts = tokenizer.encode_batch([format_prompt(p.question) for p in items])
    answers = tokenizer.encode_batch([f" {p.answer}" for p in items], add_special_tokens=False)
    ids = [prompt.ids + answer.ids + [EOS] for prompt, answer in zip(prompts, answers, strict=True)]
    return ids, [len(prompt.ids) for prompt in prompts]


def save_tokenizer(tokenizer: Tokenizer, directory: Path, max_length: int) -> None:
    """Writes tokenizer.json, tokenizer_config.json, special_tokens_map.json and generation_config.json."""
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {
        "bos_token": SPECIAL_TOKENS[BOS],
        "eos_token": SPECIAL_TOKENS[EOS],
        "pad_token": SPECIAL_TOKENS[PAD],
    }
    added = {
        str(i): {
            "content": text,
            "special": True,
            "normalized": False,
            "lstrip": False,
            "rstrip": False,
            "single_word": False,
        }
        for i, text in enumerate(SPECIAL_TOKENS)
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **names,
        "mask_token": SPECIAL_TOKENS[MASK],
        "additional_special_tokens": [SPECIAL_TOKENS[i] for i in (END_OF_TURN, IMAGE, VIDEO, AUDIO)],
        "added_tokens_decoder": added,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(directory / "tokenizer_config.json", config)
    _write_json(directory / "special_tokens_map.json", {**names, "mask_token": SPECIAL_TOKENS[MASK]})
    generation = {
        "bos_token_id": BOS,
        "eos_token_id": [EOS, END_OF_TURN],
        "pad_token_id": PAD,
        "do_sample": False,
    }
    _write_json(directory / "generation_config.json", generation)


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
