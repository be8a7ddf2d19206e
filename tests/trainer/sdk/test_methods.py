"""Every public method of the client libraries, called against a real service.

The tables say what each does here: it works, or it is refused at once, with a sentence that has
these words in it. A method that a new version of a library adds is in no table: then this fails.
`name*` stands for `name` and `name_async`.
"""

from pathlib import Path
from typing import Any

import pytest

from trainer.house import House

WORKS = "works"
PROGRAM = f"""
import runpy
runpy.run_path({str(Path(__file__).with_name("methods.py"))!r}, run_name="__main__")
"""
AT_ONCE_S = 15.0
"""An import of the library's may be part of a call; what is tried again takes far longer."""

Table = dict[str, dict[str, str]]

# What the libraries refuse themselves, without asking the service.
LOOP = "incorrect event loop"
NO_TORCH = "PyTorch is not installed"  # with it, forward_backward_custom works: test_reference.py
MANAGED = "requires SDK-managed sampler state"
UNRESOLVED = "SDK-managed service did not resolve"
SERVERLESS = "only through a serverless endpoint"
FIREWORKS_KEY = "requires a Fireworks API key"
PROVISIONED = "require a provisioned trainer"

# What the service refuses.
BILLS = "this service keeps no bills and no audit log"
PROJECTS = "there are no projects here"
TAKING_OUT = "weights cannot be taken out over the network"
NO_OUTPUT = "unknown key 'output'"

TINKER: Table = {
    "ServiceClient": {
        WORKS: """
            close create_lora_training_client* create_rest_client create_sampling_client*
            create_training_client_from_state* create_training_client_from_state_with_optimizer*
            get_console_url get_server_capabilities* get_telemetry holder""",
        PROJECTS: "copy_weights",
        NO_TORCH: "create_custom_loss",
    },
    "TrainingClient": {
        WORKS: """
            create_sampling_client* forward* forward_backward* get_console_url get_info*
            get_telemetry get_tokenizer load_state* load_state_with_optimizer* optim_step*
            save_state* save_weights_and_get_sampling_client* save_weights_for_sampler*""",
        NO_TORCH: "forward_backward_custom*",
        TAKING_OUT: "save_weights_external*",
    },
    "SamplingClient": {
        WORKS: """
            compute_logprobs* create from_sampler_handle get_base_model* get_sampler_handle
            get_telemetry on_queue_state_change sample*""",
        # Of the hub, by the name of the base; TrainingClient's comes from the base's folder.
        "huggingface.co": "get_tokenizer",
    },
    "RestClient": {
        WORKS: """
            delete_checkpoint* delete_checkpoint_from_tinker_path* get_sampler* get_session*
            get_telemetry get_training_run* get_training_run_by_tinker_path*
            get_weights_info_by_tinker_path list_checkpoints* list_sessions* list_training_runs*
            list_user_checkpoints* publish_checkpoint_from_tinker_path*
            set_checkpoint_ttl_from_tinker_path* unpublish_checkpoint_from_tinker_path*""",
        PROJECTS: "assign_session_project* copy_weights*",
        TAKING_OUT: "get_external_weights_urls*",
        "sessions leave no traces here": "export_session_trace*",
        "list_sessions lists all of them": "search_sessions*",
        BILLS: "get_audit_log get_billing_usage* get_current_checkpoint_storage_usage*",
        LOOP: "get_audit_log_async",
        "whoami requires JWT auth": "whoami",
    },
    "AdminClient": {
        WORKS: "get_telemetry",
        BILLS: "get_audit_log get_billing_usage* get_current_checkpoint_storage_usage*",
        LOOP: "get_audit_log_async",
    },
}

FIREWORKS: Table = {
    "ServiceClient": {
        WORKS: """
            accelerator_count accelerator_type close create_base_training_client
            create_lora_training_client* create_reference_client create_rest_client
            create_training_client delete_training_session from_firetitan_config
            get_server_capabilities* get_telemetry managed_accelerator_count
            managed_accelerator_type managed_deployment_id managed_deployment_shape
            managed_max_context_length managed_trainer_job_id managed_training_profile
            reference_job_id reference_trainer_job_id release_references
            requires_initial_sampler_sync training_profile training_session_id
            training_session_name""",
        MANAGED: "create_deployment_sampler create_sampling_client* hotload_sampler_snapshot",
        FIREWORKS_KEY: "create_deployment_sampler_for_model create_inference_deployment_sampler",
        SERVERLESS: """
            create_training_client_from_state*
            create_training_client_from_state_with_optimizer*""",
        UNRESOLVED: """
            deployment_id deployment_shape max_context_length reference_client_job_id
            trainer_job_id""",
        PROVISIONED: "list_checkpoints promote_checkpoint",
    },
    "TrainingClient": {
        WORKS: """
            comms create_base_training_client forward* forward_backward* get_info* get_telemetry
            list_checkpoints load_adapter load_state* load_state_with_optimizer* optim_step*
            resolve_checkpoint_path run_id save_state* save_weights_for_sampler*
            save_weights_for_sampler_ext supports_rdma_weight_sync unload_model""",
        MANAGED: "create_sampling_client* weight_sync*",
        NO_OUTPUT: "forward_backward_contrastive forward_projection",
        LOOP: "forward_backward_contrastive_async",
        NO_TORCH: "forward_backward_custom*",
        "requires a tokenizer_model": "get_tokenizer",
    },
    "SamplingClient": {
        WORKS: """
            close create from_sampler_handle get_base_model* get_sampler_handle get_telemetry
            on_queue_state_change""",
        "400 Bad Request": "compute_logprobs* sample*",
        "without a tokenizer": "get_tokenizer",
    },
    "RestClient": {WORKS: "get_telemetry", SERVERLESS: "get_weights_info_by_tinker_path"},
}


def flat(table: Table) -> dict[str, str]:
    """Every method with what it does here."""
    found: dict[str, str] = {}
    for owner, outcomes in table.items():
        for outcome, names in outcomes.items():
            for name in names.split():
                plain = name.removesuffix("*")
                for one in {plain, plain + "_async" if name.endswith("*") else plain}:
                    assert f"{owner}.{one}" not in found, f"{owner}.{one} is in the table twice"
                    found[f"{owner}.{one}"] = outcome
    return found


@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("library", "table"), [("tinker", TINKER), ("fireworks", FIREWORKS)])
def test_every_method_works_or_is_refused_at_once(
    there: House, library: str, table: Table
) -> None:
    """No public method hangs, and none fails with something that says nothing."""
    nowhere = "http://127.0.0.1:9"  # a library that calls home must not get there
    before = there.epoch()
    said = there.run(
        PROGRAM,
        LIBRARY=library,
        HTTPS_PROXY=nowhere,
        HTTP_PROXY=nowhere,
        NO_PROXY="127.0.0.1",
    )
    told = {one["name"]: one for one in said}
    wanted = flat(table)
    assert told.keys() - wanted.keys() == set(), "new methods: does each work, or is it refused?"
    assert wanted.keys() - told.keys() == set(), "there are no such methods any more"
    wrong = [one for one in said if not as_told(one, wanted[one["name"]])]
    assert not wrong
    assert there.epoch() == before, there.log()


def as_told(one: dict[str, Any], wanted: str) -> bool:
    """Whether a call came to what the table says."""
    if one["took_s"] > AT_ONCE_S:
        return False
    if wanted == WORKS:
        return one["error"] is None
    return one["error"] is not None and wanted in one["text"]
