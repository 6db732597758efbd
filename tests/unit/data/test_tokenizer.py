import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from megarl.data.tokenizer import load_tokenizer, render_chat, token_texts
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
