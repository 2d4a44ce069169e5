"""The model that `up` loads: from the catalogue, or a folder of one's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tunerack.api.bases import default_base
from tunerack.catalog.models import find
from tunerack.errors import Invalid
from tunerack.settings import Settings


def test_names_and_aliases(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path)
    assert default_base(settings, None)[1] is None
    assert default_base(settings, "smollm2-135m")[1] == "smollm2-135m"
    with pytest.raises(Invalid, match="did you mean smollm2-135m"):
        default_base(settings, "smolm2-135m")


def test_a_folder_of_ones_own_is_kept_for_the_next_start(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "home")
    folder = tmp_path / 'my "odd" model'
    folder.mkdir()
    catalogue, name = default_base(settings, f"mine={folder}")
    assert name == "mine"
    assert catalogue.find("mine").source.path == str(folder)
    assert default_base(settings, f"mine={folder}")[1] == "mine"
    assert default_base(settings, "mine")[1] == "mine"
    other = tmp_path / "other"
    other.mkdir()
    assert default_base(settings, f"other={other}")[1] == "other"
    file = settings.home / "catalog" / "models.toml"
    assert find("mine", file).source.path == str(folder)
    assert find("other", file).source.path == str(other)


@pytest.mark.parametrize("asked", ["smollm2-135m={}", "mine={}/none", "a/../b={}"])
def test_what_is_refused_changes_nothing(tmp_path: Path, asked: str) -> None:
    settings = Settings(home=tmp_path / "home")
    with pytest.raises(Invalid):
        default_base(settings, asked.format(tmp_path))
    assert not (settings.home / "catalog").exists()


def test_a_repository_of_the_hub_under_its_own_or_another_name(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "home")
    file = settings.home / "catalog" / "models.toml"
    assert default_base(settings, "some-org/Some-Model.v1")[1] == "some-org/Some-Model.v1"
    assert default_base(settings, "short=some-org/Some-Model.v1")[1] == "short"
    for name in ("some-org/Some-Model.v1", "short"):
        source = find(name, file).source
        assert (source.kind, source.repo) == ("hub", "some-org/Some-Model.v1")
    # An alias of the catalogue is not taken for a repository.
    assert default_base(settings, "HuggingFaceTB/SmolLM2-135M-Instruct")[1] == "smollm2-135m"
