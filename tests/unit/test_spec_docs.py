"""The reference pages of jobs and data, against the declarations and the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tunerack.data.formats import ROW_FORMATS
from tunerack.spec.fields import Field, job_fields, lora_fields
from tunerack.spec.jobfile import job_from_file

PAGES = Path(__file__).resolve().parents[2] / "docs" / "reference"


@pytest.mark.parametrize("title", ["Fields", "Fields of `lora`"])
def test_every_field_has_its_row(title: str) -> None:
    page = (PAGES / "job.md").read_text()
    section = page.split(f"## {title}\n")[1].split("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", section, re.MULTILINE))
    fields = job_fields() if title == "Fields" else lora_fields()
    assert list(rows) == list(fields)
    for name, field in fields.items():
        assert_row(field, rows[name])


def assert_row(field: Field, row: str) -> None:
    accepts, default, meaning = row.split(" | ")
    assert accepts == field.accepts
    assert meaning.lower() == field.doc.lower()
    if isinstance(field.default, int | float | str) and not isinstance(field.default, bool):
        assert default == str(field.default)


def test_the_example_of_the_job_page_is_a_job(tmp_path: Path) -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", (PAGES / "job.md").read_text(), re.DOTALL)
    path = tmp_path / "job.yaml"
    path.write_text(example)
    spec = job_from_file(path)
    assert (spec.adapter_name, spec.learning_rate, spec.lora.rank) == ("support-triage", 0.001, 8)


def test_the_data_page_names_formats_reasons_and_examples(tmp_path: Path) -> None:
    from tunerack.data.rows import read_rows

    page = (PAGES / "data.md").read_text()
    for name, row_format in ROW_FORMATS.items():
        assert f"| {name} |" in page
        assert all(f"`{key}`" in page for key in row_format.required)
    source = (PAGES.parents[1] / "src/tunerack/data/dataset.py").read_text()
    for reason in [*re.findall(r'Count\("(\w+)"', source), "duplicate", "merged_boundary", "stop_token_in_text"]:
        assert reason in source
        assert f"`{reason}`" in page
    (examples,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    formats = []
    for number, line in enumerate(examples.splitlines()):
        path = tmp_path / f"{number}.jsonl"
        path.write_text(line)
        formats.append(read_rows(path).format)
        read_rows(path).require()
    assert formats == list(ROW_FORMATS)
