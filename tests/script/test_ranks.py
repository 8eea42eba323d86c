"""A script of several ranks is refused: one of them would be predicted as if it were alone."""

from __future__ import annotations

import pytest
import torch
from tests.script.running import recorded

from memfit.errors import RecordingError

DATA_PARALLEL = """
import os
import torch
from torch import nn

torch.distributed.init_process_group("gloo"{arguments})
place = os.environ["LOCAL_RANK"]
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
"""
SHARDED = """
import torch
from torch.distributed.fsdp import fully_shard

torch.distributed.init_process_group("nccl")
fully_shard(torch.nn.Linear(8, 8).cuda())
"""
ADDRESS = "tcp://127.0.0.1:29513?rank=0&world_size=4"


@pytest.fixture
def record(tmp_path, monkeypatch):
    """Return what records a script under the variables that torchrun sets."""

    def run(script, num_ranks=None, *, device="cpu"):
        path = tmp_path / "train.py"
        path.write_text(script)
        if num_ranks is not None:
            known = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": num_ranks}
            known |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29512}
            for name, value in known.items():
                monkeypatch.setenv(name, str(value))
        return recorded(path, device=device, num_steps=3)

    yield run
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("device", ["cpu", "t4"])
@pytest.mark.parametrize(
    ("arguments", "in_environment", "num_ranks"),
    [("", 8, 8), (", world_size=2, rank=0", 8, 2), (f", init_method={ADDRESS!r}", None, 4)],
)
def test_a_group_of_several_ranks_is_refused(record, arguments, in_environment, num_ranks, device):
    script = DATA_PARALLEL.format(arguments=arguments)
    with pytest.raises(RecordingError, match=rf"has {num_ranks} ranks.*--ranks N"):
        record(script, in_environment, device=device)


def test_a_group_of_one_rank_is_recorded(record):
    assert len(record(DATA_PARALLEL.format(arguments=""), 1).recording.marks) == 3


def test_where_the_variables_are_missing_they_are_named(record):
    script = DATA_PARALLEL.format(arguments=f", init_method={ADDRESS[:-1]!r} + '1'")
    with pytest.raises(RecordingError, match=r"'LOCAL_RANK'.*WORLD_SIZE=1"):
        record(script)


def test_ranks_laid_out_as_a_mesh_are_refused_on_a_card(record):
    with pytest.raises(RecordingError, match=r"mesh, as fully_shard does.*--ranks N"):
        record(SHARDED, 1, device="t4")
