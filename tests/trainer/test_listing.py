"""Tinker's REST client lists and deletes what there is."""

from pathlib import Path

import pytest

from trainer.house import house

PROGRAM = """
client = service.create_lora_training_client(base_model=BASE, rank=4)
client.forward_backward([datum("hello")], "cross_entropy").result()
client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
state = client.save_state("one").result().path
sampler = client.save_weights_for_sampler("two").result().path
rest = service.create_rest_client()
runs = rest.list_training_runs().result()
say(runs=[one.training_run_id for one in runs.training_runs], total=runs.cursor.total_count)
run = rest.get_training_run(client.model_id).result()
say(lora=run.lora_rank, base=run.base_model, last=run.last_checkpoint.tinker_path)
listed = rest.list_checkpoints(client.model_id).result()
say(paths=sorted(one.tinker_path for one in listed.checkpoints), want=sorted([state, sampler]))
session = service.holder.get_session_id()
say(sessions=session in rest.list_sessions().result().sessions)
say(models=rest.get_session(session).result().training_run_ids == [client.model_id])
rest.delete_checkpoint(client.model_id, "weights/one").result()
listed = rest.list_checkpoints(client.model_id).result()
say(paths=[one.tinker_path for one in listed.checkpoints], want=[sampler])
say(path=client.save_state("one").result().path, want=state)
again = service.create_training_client_from_state_with_optimizer(state)
say(loss=again.forward([datum("hello")], "cross_entropy").result().metrics["loss:sum"])
"""


@pytest.mark.long
def test_runs_and_checkpoints_are_listed_and_deleted(tmp_path: Path) -> None:
    """A deleted checkpoint is gone from the list, and its name may be used again."""
    with house(tmp_path) as there:
        runs, run, paths, sessions, models, fewer, again, loss = there.run(PROGRAM)
    assert runs["total"] == len(runs["runs"]) == 1
    assert (run["lora"], run["base"]) == (4, "holdfast/tiny")
    assert run["last"].endswith("/weights/one")
    assert paths["paths"] == paths["want"]
    assert sessions["sessions"]
    assert models["models"]
    assert fewer["paths"] == fewer["want"]
    assert again["path"] == again["want"]
    assert loss["loss"] > 0
