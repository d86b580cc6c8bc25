"""Text in and token ids out, and back: the tokenizer and chat template of a model folder."""

import json
from collections.abc import Sequence
from pathlib import Path

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from sgl_muse_mega.errors import UserError


def read_utf8(path: Path) -> str:
    """Content of a file. Raises UserError when it cannot be read or is not UTF-8."""
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error.reason}, byte {error.start}); convert it.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None


class Text:
    """The tokenizer of a target folder.

    Prompts are wrapped by the folder's chat template: chat_template.jinja, or chat_template in tokenizer_config.json.
    """

    def __init__(self, directory: Path) -> None:
        """Raises UserError for a missing or unreadable tokenizer.json."""
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise UserError(f"{path} does not exist; the model folder needs its tokenizer.json.")
        try:
            self.tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises no narrower type
            raise UserError(f"{path} cannot be read as a tokenizer: {error}.") from None
        self._directory = directory

    def encode(self, prompt: str, *, raw: bool, name: str = "The prompt") -> list[int]:
        """Token ids of a prompt, at least one, wrapped by the chat template as one user message unless `raw`.

        Raises UserError for a prompt without text, one that is not Unicode or one without a token that the tokenizer
        knows, and for a folder without a usable template. `name` is what the sentence calls the prompt.
        """
        if not prompt.strip():
            raise UserError(f"{name} is empty, so there is nothing to continue; give some text.")
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise UserError(f"{name} is not valid UTF-8; convert it to UTF-8.") from None
        text = prompt if raw else self._wrap(prompt)
        # a chat template writes the special tokens itself
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=raw).ids
        if not ids:
            raise UserError(f"{name} gives no token with the tokenizer of {self._directory}; give other text.")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of generated ids without special tokens."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def _wrap(self, prompt: str) -> str:
        config_path = self._directory / "tokenizer_config.json"
        template_path = self._directory / "chat_template.jinja"
        try:
            config = json.loads(config_path.read_text(encoding="utf-8")) if config_path.is_file() else {}
            template = template_path.read_text("utf-8") if template_path.is_file() else config.get("chat_template")
            if not isinstance(template, str):
                raise UserError(f"{self._directory} has no chat template; use --raw to pass the prompt as it is.")
            environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
            names = {name: _token_text(config.get(name)) for name in ("bos_token", "eos_token", "pad_token")}
            messages = [{"role": "user", "content": prompt}]
            return environment.from_string(template).render(messages=messages, add_generation_prompt=True, **names)
        except UserError:
            raise
        except Exception as error:  # a template is a program and can fail in any way
            raise UserError(f"The chat template of {self._directory} cannot be used: {error}.") from None


class TextStream:
    """Generated ids to text piece by piece: a character that spans several tokens comes out whole."""

    def __init__(self, text: Text) -> None:
        self._text = text
        self._stream = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._shown = ""

    def push(self, ids: Sequence[int]) -> str:
        """The text that `ids` complete."""
        pieces = [self._stream.step(self._text.tokenizer, token) or "" for token in ids]
        self._ids.extend(ids)
        self._shown += "".join(pieces)
        return "".join(pieces)

    def finish(self) -> str:
        """What was held back for a character that never became complete."""
        return self._text.decode(self._ids).removeprefix(self._shown)


def _token_text(entry: object) -> str:
    """A special token as tokenizer_config.json writes it: a string, or an object with its content."""
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else ""
