"""A base model that a user added by its folder, with no configuration in the catalogue."""

from __future__ import annotations

from tunerack.cli.offers import offers
from tunerack.settings import Settings
from tunerack.spec.job import JobSpec
from tunerack.worker.process import Process


def test_it_loads_and_has_no_offers(tiny_llama, tmp_path):
    catalogue = tmp_path / "catalog" / "models.toml"
    catalogue.parent.mkdir()
    catalogue.write_text(f'[models.mine]\nsource = {{ kind = "path", path = "{tiny_llama}" }}\n')
    settings = Settings(home=tmp_path)
    engine = Process(settings, "mine", "worker-1")._build()
    assert engine.base.name == "mine"
    assert engine.base.decoder.architecture.hidden_size == 48
    plan = {"spec": JobSpec(model="mine", training_file="f").to_json(), "report": {"rows_kept": 8}}
    assert offers(plan, settings) == ()
