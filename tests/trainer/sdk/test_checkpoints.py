"""Checkpoints after they were saved: published, given a time to live, named in short, loaded."""

from typing import Any

from gateway.service import Answer
from patience import until
from trainer.house import JOB, House
from trainer.sdk.programs import run
from trainer.sdk.saved import folder
from trainer.sdk.wire import Session

PROGRAM = """
rest = service.create_rest_client()
client = lora()
def listed():
    return {one.tinker_path: [one.public, one.expires_at and one.expires_at.timestamp()]
            for one in rest.list_checkpoints(client.model_id).result().checkpoints}
path = client.save_state("x", user_metadata={"why": "a test"}).result().path
brief = client.save_weights_for_sampler("brief").result().path
sampler = service.create_sampling_client(model_path=brief)
def sample():
    sampler.sample(prompt=types.ModelInput.from_ints([1]), num_samples=1,
        sampling_params=types.SamplingParams(max_tokens=1)).result()
sample()
say(path=path, brief=brief, before=listed(),
    notes=rest.list_checkpoints(client.model_id).result().checkpoints[-1].user_metadata,
    sampler=rest.get_sampler(sampler._sampling_session_id).result().model_path)
for _ in range(2):
    rest.publish_checkpoint_from_tinker_path(path).result()
say(published=listed()[path])
rest.set_checkpoint_ttl_from_tinker_path(path, 7200).result()
say(limited=listed()[path], now=time.time())
rest.set_checkpoint_ttl_from_tinker_path(path, None).result()
for _ in range(2):
    rest.unpublish_checkpoint_from_tinker_path(path).result()
say(after=listed()[path])
rest.set_checkpoint_ttl_from_tinker_path(brief, 1).result()
while brief in listed():
    time.sleep(0.05)
attempt("sample", sample)
for name, ask in {
    "publish": rest.publish_checkpoint_from_tinker_path,
    "unpublish": rest.unpublish_checkpoint_from_tinker_path,
    "ttl": lambda path: rest.set_checkpoint_ttl_from_tinker_path(path, 3600),
}.items():
    attempt(name, lambda: ask(brief).result())
attempt("ttl of nothing", lambda: rest.set_checkpoint_ttl_from_tinker_path(path, 0).result())
run, session = rest.get_training_run(client.model_id).result(), service.holder.get_session_id()
runs = rest.list_training_runs(limit=1000).result()
say(run=[run.lora_rank, run.base_model, run.last_checkpoint.tinker_path],
    counted=runs.cursor.total_count == len(runs.training_runs),
    listed=client.model_id in [one.training_run_id for one in runs.training_runs],
    lives=session in rest.list_sessions(limit=1000).result().sessions,
    models=rest.get_session(session).result().training_run_ids == [client.model_id])
rest.delete_checkpoint(client.model_id, "weights/x").result()
attempt("load", lambda: client.load_state_with_optimizer(path).result())
attempt("begin", lambda: service.create_training_client_from_state(path))
attempt("delete twice", lambda: rest.delete_checkpoint_from_tinker_path(path).result())
say(left=listed(), again=client.save_state("x").result().path)
"""


def test_published_and_kept_for_a_time(there: House) -> None:
    """Both are told in listings, can be taken back and asked for twice; what is over is gone,
    record and files, and whoever still uses it hears so, and no trainer dies of it. Runs and
    sessions are listed, too; a deleted checkpoint is not, and its name may be used again."""
    before = there.epoch()
    first, published, limited, after, *rest = run(there, PROGRAM)
    sampled, *gone, nothing, about, load, begin, twice, deleted = rest
    path, brief = first["path"], first["brief"]
    assert first["before"] == {path: [False, None], brief: [False, None]}
    assert first["notes"] == {"why": "a test"}
    assert first["sampler"] == brief
    assert published["published"] == [True, None]
    public, ends = limited["limited"]
    assert public
    assert limited["now"] + 7100 < ends <= limited["now"] + 7200
    assert after["after"] == [False, None]
    for one in (sampled, load):
        assert (one["error"], one["category"]) == ("RequestFailedError", "user"), one
    for one in (*gone, begin, twice):
        assert (one["error"], one["status"]) == ("NotFoundError", 404), one
    assert (nothing["error"], nothing["status"]) == ("BadRequestError", 400), nothing
    assert "ttl_seconds" in nothing["text"]
    assert folder(there, path).exists()
    home = folder(there, path).parents[1]
    model = brief.split("/")[2]
    until(lambda: not (home / f"{model}.s.brief").exists(), "the files are gone")
    assert about.pop("run") == [4, "holdfast/tiny", path]
    assert all(about.values()), about
    assert deleted == {"left": {}, "again": path}
    assert there.epoch() == before, there.log()


class Saved:
    """A model with some checkpoints, over plain HTTP."""

    def __init__(self, there: House) -> None:
        self._there = there
        self.model = Session(there).model()
        self.seq = 0

    def save(self, name: str, what: str = "save_weights") -> None:
        self.seq += 1
        self.model.do((what, self.model.body(self.seq, path=name)))

    def ask(self, method: str, rest: str, body: Any = None) -> Answer:
        service = self._there.service
        where = f"/api/v1/training_runs/{self.model.name}/checkpoints{rest}"
        return service.ask(method, service.way(JOB, where), body)

    def names(self, *, public: bool = False) -> list[str]:
        """All of them, or those that are public."""
        found = self.ask("GET", "").json["checkpoints"]
        return sorted(one["checkpoint_id"] for one in found if one["public"] or not public)


def test_ids_without_a_folder(there: House) -> None:
    """A name alone means the one checkpoint that has it; of two nothing is done, nor where the
    time to live is none."""
    saved = Saved(there)
    for name in ("state", "both", "publish"):
        saved.save(name)
    for name in ("sampler", "both"):
        saved.save(name, "save_weights_for_sampler")
    assert saved.ask("POST", "/state/publish").status == 200
    assert saved.ask("POST", "/sampler/publish").status == 200
    assert saved.ask("PUT", "/sampler/ttl", {"ttl_seconds": 3600}).status == 200
    assert saved.names(public=True) == ["sampler_weights/sampler", "weights/state"]
    assert saved.ask("DELETE", "/sampler/publish").status == 200
    assert saved.names(public=True) == ["weights/state"]
    for method, rest in (("DELETE", ""), ("POST", "/publish"), ("PUT", "/ttl")):
        body = {"ttl_seconds": 3600} if method == "PUT" else None
        answer = saved.ask(method, f"/both{rest}", body)
        assert answer.status == 400, answer
        assert "say which" in answer.json["detail"]
        assert saved.ask(method, f"/never{rest}", body).status == 404
        assert saved.ask(method, f"/weights/never{rest}", body).status == 404
        assert saved.ask(method, f"/a/b/c{rest}", body).status == 404
    bad: list[Any] = [{}, {"ttl_seconds": "x"}, {"ttl_seconds": -1}, [], None]
    for body in bad:
        assert saved.ask("PUT", "/weights/state/ttl", body).status == 400
    found = saved.ask("GET", "").json["checkpoints"]
    ends = {one["checkpoint_id"]: one["expires_at"] for one in found}
    assert ends["weights/state"] is None
    assert saved.ask("DELETE", "/weights/publish").status == 200
    assert saved.ask("DELETE", "/state").status == 200
    assert saved.names() == ["sampler_weights/both", "sampler_weights/sampler", "weights/both"]


LONGEST = """
longest, under = "x" * 128, "_" + "y" * 127
client = lora()
step(client, "something")
for name in (longest, under):
    state, sampler = client.save_state(name).result().path, published(client, name)
    client.load_state_with_optimizer(state).result()
    service.create_training_client_from_state(state)
    service.create_sampling_client(model_path=sampler).sample(
        prompt=types.ModelInput.from_ints([1]), num_samples=1,
        sampling_params=types.SamplingParams(max_tokens=1)).result()
    rest = service.create_rest_client()
    rest.publish_checkpoint_from_tinker_path(state).result()
    say(names=sorted(one.checkpoint_id.partition("/")[2] for one in
                     rest.list_checkpoints(client.model_id).result().checkpoints))
    for path in (state, sampler):
        rest.delete_checkpoint_from_tinker_path(path).result()
attempt("too long", lambda: client.save_state("x" * 129).result())
"""


def test_the_longest_names(there: House) -> None:
    """128 characters, as the refusal of 129 says: saved, loaded, sampled, listed and deleted."""
    first, second, refused = run(there, LONGEST)
    assert first["names"] == ["x" * 128] * 2
    assert second["names"] == ["_" + "y" * 127] * 2
    assert (refused["error"], refused["category"]) == ("RequestFailedError", "user")
    assert "128" in refused["text"]


def test_adapters_are_loaded_from_what_was_saved(there: House) -> None:
    """Fireworks' `load_adapter`: by path, by name, as a model of the account; nothing else."""
    saved = Saved(there)
    saved.save("a", "save_weights_for_sampler")
    saved.save("b")
    model = saved.model

    def load(path: str) -> Any:
        saved.seq += 1
        return model.do(("load_adapter", model.body(saved.seq, adapter_path=path)))

    account = there.service.account
    whole = f"tinker://{model.name}/sampler_weights/a"
    for path in (whole, "a", "b", f"accounts/{account}/models/a"):
        want = {"type": "load_adapter", "model_id": model.name, "adapter_path": path}
        assert load(path) == want
    for path in (
        "never",
        "gs://bucket/a",
        "accounts/other/models/a",
        "/etc/passwd",
        "../a",
        "x/y",
    ):
        assert load(path)["category"] == "user", path
    made = model.session.result("create_model", model.session.create(lora_config={"rank": 0}))
    body = {"model_id": made["model_id"], "seq_id": 1, "adapter_path": "a"}
    assert "no adapter" in model.session.result("load_adapter", body)["error"]
