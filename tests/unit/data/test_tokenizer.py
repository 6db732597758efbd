import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megarl.data.tokenizer import load_tokenizer, render_chat, token_bytes, token_texts
from tests.unit.data.chats import character_tokenizer, user


def saved(folder, **changes):
    character_tokenizer(**changes).save_pretrained(folder)
    return str(folder)


def test_a_saved_tokenizer_renders_as_the_original(tmp_path, tokenizer):
    loaded = load_tokenizer(saved(tmp_path))
    ids = render_chat(loaded, user("2 + 3"), for_generation=True)
    assert loaded.decode(ids) == "<|start|>user\n2 + 3<|end|>\n<|start|>assistant\n"
    assert ids == render_chat(tokenizer, user("2 + 3"), for_generation=True)
    assert loaded.pad_token == "<|pad|>"


def test_without_a_pad_token_the_end_token_pads(tmp_path):
    loaded = load_tokenizer(saved(tmp_path, pad_token=None))
    assert loaded.pad_token_id == loaded.eos_token_id == loaded.convert_tokens_to_ids("<|end|>")


def test_missing_parts_are_named(tmp_path):
    with pytest.raises(ValueError, match="is not a folder; download"):
        load_tokenizer(str(tmp_path / "absent"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="tokenizer cannot be loaded"):
        load_tokenizer(str(tmp_path / "empty"))
    with pytest.raises(ValueError, match="no chat template.*chat_template.jinja"):
        load_tokenizer(saved(tmp_path / "a", template=None))
    with pytest.raises(ValueError, match="no end token.*eos_token"):
        load_tokenizer(saved(tmp_path / "b", eos_token=None))


def test_a_template_that_refuses_says_why(tokenizer):
    with pytest.raises(ValueError, match=r"refuses messages with the roles \['tool'\]: no tools here"):
        render_chat(tokenizer, [{"role": "tool", "content": "x"}], for_generation=True)


def test_a_token_by_itself_keeps_its_space():
    """SentencePiece's space marker is lost when the first word is decoded, and part of a character is not
    text."""
    vocabulary = [("<unk>", 0.0), ("\u2581two", -1.0), ("words", -1.0), ("\u2581", -2.0), ("<0xC3>", -3.0)]
    backend = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    loaded = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    assert token_texts(loaded, [1, 2, 3, 4]) == {1: " two", 2: "words", 3: " ", 4: "\ufffd"}


def byte_level():
    """Byte-level BPE with a merged leading space, and with a token of one and a half characters."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    pieces = {
        piece: index for index, piece in enumerate([*sorted(alphabet), "\u0120a", "a\u00f0", "a\u00f0\u0141"])
    }
    backend = Tokenizer(models.BPE(pieces, [("\u0120", "a"), ("a", "\u00f0"), ("a\u00f0", "\u0141")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def byte_fallback():
    """SentencePiece's BPE, which falls back to bytes."""
    pieces = ["<unk>", "\u2581", "a", "\u2581a", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocabulary, [("\u2581", "a")], unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@pytest.mark.parametrize(
    "text",
    ["a\U0001f60a", " a\u00e9 \u4e2d", "\ufffd\ufffd", "a\x00\n<0xC3>", "\U0001f468\u200d\U0001f469", ""],
)
def test_the_bytes_of_tokens_are_those_of_their_text(make, text):
    loaded = make()
    ids = loaded.encode(text, add_special_tokens=False)
    found = token_bytes(loaded, ids)
    assert b"".join(found[token] for token in ids) == text.encode()


def test_a_part_of_a_character_has_its_own_bytes():
    assert list(token_bytes(byte_level(), byte_level().encode("a\U0001f60a")).values()) == [
        b"a\xf0\x9f",
        b"\x98",
        b"\x8a",
    ]
    loaded = byte_fallback()
    parts = loaded.convert_tokens_to_ids(["<0xE2>", "<0x0A>", "\u2581a"])
    assert list(token_bytes(loaded, parts).values()) == [b"\xe2", b"\n", b" a"]
