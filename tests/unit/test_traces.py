"""Trace files in every published format; what is broken in them is told with its line."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from pathlib import Path

import pytest

from tunerack.errors import Invalid
from tunerack.schedule.traces.read import read_trace
from tunerack.schedule.traces.trace import Trace

SHARED = Path(__file__).parents[3] / "shared" / "traces"


def written(folder: Path, text: str, name: str = "jobs.csv") -> Trace:
    (folder / name).write_text(text)
    return read_trace(str(folder / name))


def test_the_formats_with_a_header(tmp_path: Path) -> None:
    raw = written(tmp_path, "job_id,submission_time,duration,num_gpu\nb,20,5,2\na,10,7,1\n")
    assert [(j.id, j.submitted_s, j.work_s, j.gang) for j in raw.jobs] == [("a", 10, 7, 1), ("b", 20, 5, 2)]
    philly = written(
        tmp_path, "timestamp,duration,num_gpus,gpu_time,cluster\n2017-10-09 00:01:00,66.0,1,66,x\n2017-10-09,2,4,8,y\n"
    )
    assert [(j.team, j.gang) for j in philly.jobs] == [("y", 4), ("x", 1)]
    assert philly.jobs[1].submitted_s - philly.jobs[0].submitted_s == 60
    chronus = written(
        tmp_path,
        "job_id,user,num_gpu,submit_time,iterations,model_name,duration,interval,expect_time_list,expect_value_list,"
        "best_effort,job_type\n0,u,4,100,6910,resnet101,211,8,282-300,10,0,strict\n1,u,0,100,1,m,5,8,9,1,0,strict\n",
    )
    assert chronus.jobs[0].deadline_s == 382
    assert chronus.notes == ("1 rows left out: they ask for no device",)
    tiresias = written(
        tmp_path, "job_id,num_gpu,submit_time,iterations,model_name,duration,interval\n0,8,30,606,vgg19,164,30\n"
    )
    assert (tiresias.jobs[0].gang, tiresias.jobs[0].work_s, tiresias.deadlines) == (8, 164, False)


def test_the_table_of_speeds_beside_a_trace_makes_its_jobs_elastic(tmp_path: Path) -> None:
    table = b"global_batch_size,1,2,4\n64,1.0,1.8,nan\n"
    with tarfile.open(tmp_path / "throughput_tables.tar.gz", "w:gz") as tar:
        member = tarfile.TarInfo("throughputs_T4/bert.csv")
        member.size = len(table)
        tar.addfile(member, io.BytesIO(table))
    text = "job_id,submit_time,iteration,model_name,ddl,batch_size,num_gpu,duration,best_effort\n"
    trace = written(tmp_path, text + "0,0,900,bert,5896,64,2,500,0\n1,0,90,bert,100,64,1,90,1\n")
    first, second = trace.jobs
    assert first.work_s == pytest.approx(500)
    assert first.scaling.widths("T4") == pytest.approx({1: 1 / 1.8, 2: 1.0})
    assert (trace.kind, first.deadline_s, second.deadline_s) == ("T4", 5896, None)


GAVEL = "ResNet-18 (batch size 128)\tpython3 main.py\timages\t--num_steps\t1\t3600\t2\t1\t-1.000000\t7\n"


def test_gavels_traces_need_its_table(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=r"no durations.*--throughputs"):
        written(tmp_path, GAVEL, "a.trace")
    table = {
        "v100": {"('ResNet-18 (batch size 128)', 2)": {"null": 10.0}},
        "k80": {"('ResNet-18 (batch size 128)', 2)": {"null": 2.5}},
        "v100_unconsolidated": {"('ResNet-18 (batch size 128)', 2)": {"null": 5.0}},
    }
    with gzip.open(tmp_path / "simulation_throughputs.json.gz", "wt") as file:
        json.dump(table, file)
    [job] = written(tmp_path, GAVEL, "a.trace").jobs
    assert (job.gang, job.work_s, job.submitted_s) == (2, 360, 7)
    assert [job.scaling.speed("v100", 2), job.scaling.speed("k80", 2)] == [1.0, 0.25]
    assert job.scaling.speed("v100", 2, nodes=2) == 0.5
    assert job.scaling.speed("k80", 1) == 0.0


def test_shockwaves_traces_have_durations(tmp_path: Path) -> None:
    [job] = written(tmp_path, "LM (batch size 10)\tpython3\tx\t--steps\t1\t134583\t4\tgns\t1\t-1\t1418\t5\n").jobs
    assert (job.gang, job.work_s, job.submitted_s) == (4, 1418, 5)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("job_id,submission_time,duration,num_gpu\na,1,2,1\nb,x,2,1\n", r"jobs.csv:3: submission_time is not a number"),
        ("job_id,submission_time,duration,num_gpu\na,1,-2,1\n", r"jobs.csv:2: duration is -2; it is at least 0"),
        ("job_id,submission_time,duration,num_gpu\na,1,inf,1\n", r"jobs.csv:2: duration is not finite"),
        ("job_id,submission_time,duration,num_gpu\na,1,2,-1\n", r"jobs.csv:2: num_gpu is -1"),
        ("job_id,submission_time,duration,num_gpu\na,1,2,1.5\n", r"jobs.csv:2: num_gpu is not a whole number"),
        ("job_id,submission_time,duration,num_gpu\na,1,2\n", r"jobs.csv:2: the row has another number of columns"),
        ("job_id,submission_time,duration,num_gpu\na,1,2,1\na,1,2,1\n", r"job 'a' is there 2 times"),
        ("job_id,submission_time,duration,num_gpu\n", r"there is no job in it"),
        ("", r"the file is empty"),
        ("a,b\n1,2\n", r"no trace format has the columns"),
        ("timestamp,duration,num_gpus,gpu_time,cluster\nyesterday,1,1,1,x\n", r"jobs.csv:2: timestamp is not a time"),
    ],
)
def test_what_is_broken_is_told_with_its_line(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(Invalid, match=told):
        written(tmp_path, text)


def test_every_broken_row_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(Invalid) as raised:
        written(tmp_path, "job_id,submission_time,duration,num_gpu\na,x,2,1\nb,1,y,1\nc,1,2,1\n")
    assert [problem.where for problem in raised.value.problems] == ["jobs.csv:2", "jobs.csv:3"]


def test_a_file_that_is_not_there_and_one_that_is_no_archive(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="no such file"):
        read_trace(str(tmp_path / "none.csv"))
    (tmp_path / "bad.csv.gz").write_bytes(b"no gzip")
    with pytest.raises(Invalid, match="can't be read"):
        read_trace(str(tmp_path / "bad.csv.gz"))


@pytest.mark.skipif(not SHARED.is_dir(), reason="the published traces are not beside this checkout")
@pytest.mark.parametrize(
    ("path", "jobs"),
    [
        ("philly/philly.csv.gz", 82_247),
        ("chronus/trace_job_Philly_SLO.csv.gz", 30_940 - 205),
        ("elasticflow/itp_deadline_cluster05.csv.gz", 3629),
        ("elasticflow/elasticVpollux_e.csv", 195),
        ("elasticflow/generated_100jobs_lam1500_seed1.csv", 100),
        ("gavel/minimize_makespan.trace", 100),
        ("gavel/artifact_evaluation.trace", 15),
        ("gavel/msr_seed0_51b7ef.trace", 18 - 1),
        ("shockwave/shockwave_120jobs_32gpu.trace", 120),
        ("tiresias/60_job.csv", 60),
        ("pollux/workloads.tar.gz:workloads/workload-6.csv", 160),
    ],
)
def test_the_published_traces(path: str, jobs: int) -> None:
    """Numbers of jobs as their publishers give them; 205 of Chronus' ask for no GPU, and Gavel's table
    has no CycleGAN on 8."""
    assert len(read_trace(str(SHARED / path)).jobs) == jobs
