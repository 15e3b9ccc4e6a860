"""Facts come from the files that state them, and a complaint names the file and the field."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest

from scheduler_svc.errors import ConfigError
from scheduler_svc.service.text.model_facts import ModelFacts, SamplingDefaults

CONFIG = {"model_type": "llama", "max_position_embeddings": 512, "vocab_size": 272}


def write(directory: Path, **files: object) -> Path:
    """Write JSON files into a directory, `config` the least if it is not given."""
    for name, content in {"config": CONFIG, **files}.items():
        (directory / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return directory


def test_the_demo_file_states_its_facts(demo_gguf: Path) -> None:
    facts = ModelFacts.from_path(demo_gguf)
    assert facts.path == demo_gguf
    assert facts.architecture == "llama"
    assert facts.max_position_embeddings == 8192
    assert facts.vocab_size == 49152
    assert facts.eos_token_ids == {2}
    assert facts.bos_token_id == 1
    assert facts.sampling == SamplingDefaults()
    assert facts.chat_template is not None
    assert "<|im_start|>" in facts.chat_template
    assert facts.special_tokens["eos_token"] == "<|im_end|>"


def test_a_gguf_file_may_recommend_sampling_and_end_turns_in_several_ways(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_context_length(64)
    writer.add_token_list(["a", "<eos>", "<eot>"])
    writer.add_eos_token_id(1)
    writer.add_eot_token_id(2)
    writer.add_float32("general.sampling.temp", 0.5)
    writer.add_int32("general.sampling.top_k", 20)
    writer.add_chat_template([{"name": "tool_use", "template": "B"}])
    writer.add_tensor("token_embd.weight", np.zeros((7, 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    facts = ModelFacts.from_path(path)
    assert (facts.architecture, facts.max_position_embeddings) == ("qwen2", 64)
    assert facts.vocab_size == 7
    assert facts.eos_token_ids == {1, 2}
    assert facts.bos_token_id is None
    assert facts.sampling == SamplingDefaults(temperature=0.5, top_k=20)
    assert (facts.chat_template, facts.tool_chat_template) == (None, "B")


def test_a_directory_needs_no_more_than_config_json(tmp_path: Path) -> None:
    assert ModelFacts.from_path(write(tmp_path)) == ModelFacts(
        path=tmp_path,
        architecture="llama",
        max_position_embeddings=512,
        vocab_size=272,
        eos_token_ids=frozenset(),
    )


def test_eos_ids_of_both_files_end_an_output(tmp_path: Path) -> None:
    facts = ModelFacts.from_path(
        write(
            tmp_path,
            config={**CONFIG, "eos_token_id": 257, "bos_token_id": 256},
            generation_config={"eos_token_id": [258, 259]},
        )
    )
    assert facts.eos_token_ids == {257, 258, 259}
    assert facts.bos_token_id == 256


def test_eos_ids_that_no_output_can_have_are_left_out(tmp_path: Path) -> None:
    """They would be sent to workers with `min_tokens`, and refused there with the request."""
    write(
        tmp_path,
        config={**CONFIG, "eos_token_id": -1},
        generation_config={"eos_token_id": [271, 272, 10**30]},
    )
    assert ModelFacts.from_path(tmp_path).eos_token_ids == {271}


def test_the_eos_text_of_the_tokenizer_serves_where_no_id_is_given(tmp_path: Path) -> None:
    tokenizer_config = {
        "eos_token": {"content": "<eos>"},
        "bos_token": "<bos>",
        "added_tokens_decoder": {"257": {"content": "<eos>"}, "258": {"content": "<eot>"}},
    }
    facts = ModelFacts.from_path(write(tmp_path, tokenizer_config=tokenizer_config))
    assert facts.eos_token_ids == {257}
    assert facts.special_tokens == {"eos_token": "<eos>", "bos_token": "<bos>"}


def test_recommended_sampling_is_read_and_nulls_say_nothing(tmp_path: Path) -> None:
    generation_config = {"temperature": 0.6, "top_p": 1, "top_k": None, "repetition_penalty": 1.1}
    facts = ModelFacts.from_path(write(tmp_path, generation_config=generation_config))
    assert facts.sampling == SamplingDefaults(temperature=0.6, top_p=1.0, repetition_penalty=1.1)


def test_the_language_part_of_a_model_for_several_media_counts(tmp_path: Path) -> None:
    config = {"model_type": "outer", "text_config": CONFIG}
    assert ModelFacts.from_path(write(tmp_path, config=config)).vocab_size == 272


@pytest.mark.parametrize(
    ("entry", "templates"),
    [
        ("A", ("A", None)),
        (
            [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}],
            ("A", "B"),
        ),
    ],
)
def test_chat_templates_are_found_by_name(
    tmp_path: Path, entry: object, templates: tuple[str, str | None]
) -> None:
    facts = ModelFacts.from_path(write(tmp_path, tokenizer_config={"chat_template": entry}))
    assert (facts.chat_template, facts.tool_chat_template) == templates


def test_a_template_file_wins_over_an_entry(tmp_path: Path) -> None:
    write(tmp_path, tokenizer_config={"chat_template": "A"}, chat_template={"chat_template": "B"})
    assert ModelFacts.from_path(tmp_path).chat_template == "B"
    (tmp_path / "chat_template.jinja").write_text("C\n")
    assert ModelFacts.from_path(tmp_path).chat_template == "C\n"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("D")
    assert ModelFacts.from_path(tmp_path).tool_chat_template == "D"


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        ({"config": {}}, r"config\.json: model_type is missing"),
        ({"config": {"model_type": "llama"}}, "max_position_embeddings is missing"),
        ({"config": {**CONFIG, "vocab_size": "many"}}, "vocab_size is 'many', must be a whole"),
        ({"config": {**CONFIG, "vocab_size": 0}}, r"vocab_size is 0, must be in \[1, 2147483647\]"),
        ({"config": {**CONFIG, "vocab_size": 1 << 31}}, "vocab_size is 2147483648, must be in"),
        ({"generation_config": {"temperature": 10**400}}, r"temperature is 1000.*, must be a num"),
        ({"config": []}, r"config\.json: holds no JSON object"),
        ({"generation_config": {"eos_token_id": ["x"]}}, r"generation_config\.json: eos_token_id"),
        ({"generation_config": {"top_k": 1.5}}, "top_k is 1.5, must be a whole number"),
        ({"tokenizer_config": {"chat_template": [1]}}, "chat_template must be a text, or a list"),
    ],
)
def test_impossible_files_are_refused(
    tmp_path: Path, files: dict[str, object], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        ModelFacts.from_path(write(tmp_path, **files))


def test_broken_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json: not JSON"):
        ModelFacts.from_path(tmp_path)
    for text in ("[" * 100_000, '{"vocab_size": ' + "9" * 5000 + "}"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=r"config\.json: not JSON"):
            ModelFacts.from_path(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"config\.json: not UTF-8 text"):
        ModelFacts.from_path(tmp_path)
