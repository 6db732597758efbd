import pytest

from tests.unit.data.chats import character_tokenizer


@pytest.fixture(scope="package")
def tokenizer():
    return character_tokenizer()
