"""Ranks that come to the end of their inputs at different times: `Join`, as PyTorch's tutorial has it."""

from __future__ import annotations

import pytest

from tests.support.harness import Job
from tests.support.ordinary_rank_scripts import BEGIN, END, GROUP, LISTEN, assert_resumes_as_if_nothing_had_happened

SCRIPT = (
    BEGIN
    + """
from torch.distributed.algorithms.join import Join
"""
    + GROUP
    + """
mine = Subset(data, range(24 - int(os.environ["FEWER"]) * rank))
model = DDP(nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = DataLoader(mine, batch_size=4, shuffle=True)
registered = {"model": model, "optimizer": optimizer, "state": state}
"""
    + LISTEN
    + """
for epoch in migrator.epochs(2):
    with JOIN:
        for x, ids in migrator.batches(loader):
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            state["step"] += 1
            trained(state["step"], loss.item().hex(), *ids.tolist())
"""
    + END
)


@pytest.mark.parametrize("join", ["Join([model])", "model.join()"])
def test_uneven_inputs_are_refused_before_anything_is_trained(job: Job, join: str) -> None:
    job.write(SCRIPT.replace("JOIN", join))

    gang = job.gang(2, FEWER="12")

    assert gang.wait() == [1, 1], gang.text
    for text in gang.texts:
        assert "UsageError: an optimizer steps inside of torch's Join" in text, gang.text
        assert "ElasticSampler" in text, gang.text
        assert "\ntrained " not in text, gang.text


def test_a_join_that_is_switched_off_is_none(job: Job) -> None:
    job.write(SCRIPT.replace("JOIN", "Join([model], enable=False)"))

    assert_resumes_as_if_nothing_had_happened(job, [(4, 1), (7, 0)], FEWER="0")
