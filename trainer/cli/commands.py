"""The commands: each is a function of the parsed options that returns an exit code.

Commands about one run, and the short ones, are here; `find` imports the others from their modules.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer import config as configs
from trainer.cli import resolving
from trainer.cli.terminal import log, show
from trainer.cli.values import NOT_HERE
from trainer.config import Config
from trainer.messages import DONE, FAILED, UserError
from trainer.train import runtime

# Modules that import jax are imported by the commands that need them: jax takes long to import, and
# the memory of a process must be configured before.
if TYPE_CHECKING:
    from trainer.engine.explanation import Elsewhere, Explanation
    from trainer.engine.program import Program
    from trainer.train.loop import Observer


def find(command: str) -> Callable[[argparse.Namespace], int]:
    """Returns the function of a command, from its name on the command line."""
    match command:
        case "checkpoint":
            from trainer.cli.inspect_checkpoints import run
        case "compare":
            from trainer.cli.comparing import run
        case "new":
            from trainer.cli.new import run
        case "optimizers":
            from trainer.cli.optimizers import run
        case "referee":
            from trainer.cli.refereeing import run
        case "sweep":
            from trainer.cli.sweeps import run
        case _ if command in globals():
            return globals()[command]
        case _:  # reports and studies
            from trainer.cli import reporting

            return getattr(reporting, command)
    return run


def train(arguments: argparse.Namespace) -> int:
    """Trains, from the newest checkpoint if there is one."""
    began = time.perf_counter()
    config = resolving.read_config(arguments)
    workdir = arguments.workdir or resolving.default_workdir(arguments.files, config)
    # Call these before jax starts its threads, which would get memory arenas of their own, and
    # before OpenBLAS starts its threads.
    runtime.keep_freed_memory()
    runtime.use_openblas_threads(Path(workdir))
    runtime.keep_compiled_programs()
    if arguments.distributed:
        from trainer.train import multihost

        # Not defaults of the parser: without --distributed, given ones are refused below.
        join, peer = arguments.join_timeout or 120, arguments.peer_timeout or 60
        if peer < 5:
            raise UserError(f"--peer_timeout must be at least 5 seconds, got {peer}.")
        with multihost.joined_processes(join, peer) as leave:
            code = _train(arguments, config, workdir, began)
            leave(code)
            return code
    if arguments.join_timeout or arguments.peer_timeout:
        raise UserError("--join_timeout and --peer_timeout are read with --distributed only.")
    return _train(arguments, config, workdir, began)


def _train(arguments: argparse.Namespace, config: Config, workdir: str, began: float) -> int:
    from trainer.train import multihost
    from trainer.train.profile import Profile
    from trainer.train.run import Run
    from trainer.train.watchdog import SlowLines
    from trainer.workdir import code

    def build() -> Run:
        one = 1 if arguments.trace else None
        program = resolving.make_program(config, arguments.vocabulary, steps_per_call=one)
        if one and program.experiment.steps > 1:
            log("--trace computes one step at a time: steps_per_call is 1.")
        return Run(
            config,
            program,
            arguments.signals,
            log,
            arguments.vocabulary,
            slow_lines=SlowLines(stacks=arguments.trace),
        )

    run = multihost.raise_on_all(build)
    if arguments.distributed:
        multihost.require_same(
            {
                "workdir": str(Path(workdir).absolute()),
                "options": f"--until={arguments.until} --trace={arguments.trace}"
                f" --profile={arguments.profile}",
                "config": configs.dump(config.root),
                "code": str(code.hashes(arguments.vocabulary)),
            }
        )
    return run.start(
        workdir,
        allow_changed=arguments.allow_changed,
        take_over=arguments.take_over,
        until=arguments.until,
        observe=_observer(arguments, workdir),
        began=began,
        profile=Profile(arguments.profile, log) if arguments.profile else None,
    )


def _observer(arguments: argparse.Namespace, workdir: str) -> "Observer | None":
    """Returns the function that observes every block for --trace and --kill_after, or None."""
    from trainer.diagnose.verify import kill_after_checkpoint, trace

    observers = []
    if arguments.trace or arguments.trace_blocks:
        observers.append(trace(workdir))
    if arguments.kill_after is not None:
        # Kill it before the last step, after which the run could end first.
        latest = (arguments.until or 2 * arguments.kill_after) - 1
        observers.append(kill_after_checkpoint(workdir, arguments.kill_after, latest))

    def observe(*block) -> None:
        for observer in observers:
            observer(*block)

    return observe if observers else None


def explain(arguments: argparse.Namespace) -> int:
    """Prints the plan and draws the schedules; compiles the step with --compile."""
    # Data of known shapes need not be on this machine, nor the devices of --devices or --target.
    if arguments.target == "list":
        from trainer.engine.targets import listed

        show(listed(), end="")
        return DONE
    elsewhere = _elsewhere(arguments)
    from trainer.engine import explanation as explanations
    from trainer.engine.plan_text import compiled_text, explained_text
    from trainer.report.plots import Line, draw_in_terminal, save_figure
    from trainer.train.continuation import begin_with

    config = resolving.read_config(arguments)
    devices = None if elsewhere is None else elsewhere.devices
    program = resolving.make_program(config, arguments.vocabulary, declared=True, devices=devices)
    explanation = explanations.explain(program, config, elsewhere)
    # Read the other run's checkpoint now, so that `explain` also finds mistakes in the warm start.
    if program.experiment.warm_start:
        begin_with(program, config, arguments.vocabulary)
    show(explained_text(explanation))
    if arguments.devices_figure:
        from trainer.report.mesh_figure import save_mesh_figure

        save_mesh_figure(explanation.holdings, explanation.memory.limit, arguments.devices_figure)
        show(f"What a device holds is drawn in {arguments.devices_figure}.\n")
    if not (schedules := explanation.plan.schedules):
        show("No group's optimizer takes a learning rate, so there is no schedule to draw.")
    else:
        show(draw_in_terminal(schedules, "learning rate by step"), end="")
        if arguments.figure:
            lines = {name: Line(*curve) for name, curve in schedules.items()}
            save_figure(lines, arguments.figure, "Learning rates", "step", "learning rate")
            show(f"The schedules are drawn in {arguments.figure}.")
    if arguments.compile:
        explanation = explanations.with_compiled(explanation, program)
        show("\n" + compiled_text(explanation), end="")
        if arguments.target and not explanation.fits:
            said = _what_fits(config, arguments.vocabulary, program, explanation)
            raise UserError(f"The step does not fit. {said}")
    if arguments.explanation:
        # For `lockstep.explain`.
        Path(arguments.explanation).write_text(explanations.to_json(explanation), encoding="utf-8")
    return DONE


def _elsewhere(arguments: argparse.Namespace) -> "Elsewhere | None":
    """Returns the devices of --target or --devices; None for those of this machine."""
    # Raises UserError for options that do not belong together.
    count, target, memory = arguments.devices, arguments.target, arguments.device_memory
    if target is not None:
        for name, given in (("devices", count), ("device_memory", memory)):
            if given is not None:
                raise UserError(
                    f"--target has the number of devices, as in h100:8, and their memory: leave out"
                    f" --{name}."
                )
        from trainer.engine.targets import elsewhere_of

        return elsewhere_of(target)
    if count is None:
        for name in ("device_memory", "devices_figure"):
            if (given := getattr(arguments, name)) is not None:
                what = "SIZE" if name == "device_memory" else given
                raise UserError(NOT_HERE.format(f"--{name}", f"--devices=N --{name}={what}"))
        return None
    from trainer.engine.explanation import Elsewhere
    from trainer.engine.memory import planned_memory
    from trainer.engine.mesh import keep_to_cpu

    keep_to_cpu(count, f"--devices={count}")
    return Elsewhere(count, "simulated device", planned_memory(memory))


def _what_fits(
    config: Config, vocabulary: Sequence[str], program: "Program", explanation: "Explanation"
) -> str:
    """Says with how many microbatches the step fits, which is compiled until it does."""
    from trainer.engine.explanation import with_compiled
    from trainer.engine.memory import in_words
    from trainer.engine.mesh import batch_parts

    size, now = program.experiment.data.batch_size, program.experiment.microbatches
    most = size // batch_parts(program.mesh)
    tried = [f"{now}: {in_words(explanation.needed)}"]
    devices = list(program.mesh.devices.flat)
    for count in (n for n in range(now + 1, most + 1) if n % now == 0 and most % n == 0):
        edited = configs.override(config, [f"microbatches={count}"])
        program = resolving.make_program(edited, vocabulary, declared=True, devices=devices)
        explanation = with_compiled(explanation, program)
        if explanation.fits:
            return (
                f"With --set microbatches={count} it needs {in_words(explanation.needed)} and fits;"
                " that was compiled, too."
            )
        tried.append(f"{count}: {in_words(explanation.needed)}")
    return (
        f"Nor does it with more microbatches ({', '.join(tried)}). Split the parameters and the"
        " state of the optimizer over more devices with the axis fsdp of mesh, have the backward"
        " pass compute more again with the model's argument remat, or make the model smaller."
    )


def verify(arguments: argparse.Namespace) -> int:
    """Checks on a config that a killed and restarted run has the same bits."""
    from trainer.diagnose.verify import verify

    program = resolving.make_program(resolving.read_config(arguments), arguments.vocabulary)
    lines, same = verify(
        program,
        config_options=resolving.config_options(arguments),
        half=arguments.steps,
        workdir=arguments.workdir,
        log=log,
    )
    show("\n".join(lines))
    return DONE if same else FAILED


def replay(arguments: argparse.Namespace) -> int:
    """Repeats one step of a run and names the first operation whose result is not finite."""
    runtime.use_openblas_threads(Path(arguments.workdir))
    from trainer.diagnose.replay import replay

    lines, finite = replay(arguments.workdir, arguments.step, arguments.vocabulary)
    show("\n".join(lines))
    return DONE if finite else FAILED


def sample(arguments: argparse.Namespace) -> int:
    """Prints the prompt and its continuation; several of them are separated by a line "----"."""
    from trainer.data.tokenizer import SubwordTokenizer
    from trainer.engine import generation
    from trainer.engine.experiment import Experiment
    from trainer.train import trained

    prompt = _prompt(arguments)
    folder = Path(arguments.workdir)
    config = trained.read_run(folder)
    resolving.ignore_optimizer_warnings()
    language = trained.read_language(folder, config, arguments.vocabulary)
    tokenizer = trained.read_tokenizer(folder, config, arguments.vocabulary)
    precision: Any = config.root.kwargs.get("precision", Experiment.precision)
    try:
        tokens = generation.encode_prompt(tokenizer, prompt)
        longest = trained.trained_length(folder)
        length = generation.fitting_length(language, len(tokens), arguments.length, longest)
        sampling = generation.Sampling(
            length, arguments.temperature, arguments.top_k, end=tokenizer.end_of_text
        )
        continuation = generation.PromptContinuation(
            language, tokenizer, tokens, sampling, precision
        )
    except ValueError as error:
        raise UserError(str(error)) from error
    found = trained.read_trained(folder, arguments.step, arguments.vocabulary)
    texts = continuation.sample(
        found.params, found.model_state, arguments.seed, arguments.num_samples
    )
    if warning := generation.length_warning(len(tokens), length, longest):
        show(f"warning: {warning}", sys.stderr)
    if prompt.endswith(" ") and isinstance(tokenizer, SubwordTokenizer):
        text = "The prompt ends in a space. Words begin with theirs, so that the model has"
        show(f"warning: {text} rarely read one alone: leave it out.", sys.stderr)
    show(f"step {found.step} of {folder}:", sys.stderr)
    show("\n----\n".join(prompt + text for text in texts))
    return DONE


def _prompt(arguments: argparse.Namespace) -> str:
    """Returns the prompt, without one newline at the end of a file or of stdin."""
    if (file := arguments.prompt_file) is None and arguments.prompt != "-":
        return arguments.prompt
    where, name = ("stdin", "--prompt=-") if file is None else (file, f"--prompt_file={file}")
    try:
        text = sys.stdin.read() if file is None else Path(file).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise UserError(
            f"The prompt cannot be read: there is no file {where}. Name a file of text."
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"The prompt in {where} is not text in UTF-8: its byte {error.start + 1} is "
            f"0x{error.object[error.start]:02x}. Convert it to UTF-8."
        ) from error
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UserError(
            f"The prompt of {name} cannot be read: {why}. Name a file of text that can be read."
        ) from error
    return text.removesuffix("\n")


def config(arguments: argparse.Namespace) -> int:
    """Prints the resolved config as canonical YAML, after checking its names and types."""
    config = resolving.read_config(arguments)
    configs.Builder(config, arguments.vocabulary).check()
    if arguments.unused:
        for each in config.unused:
            show(f"{each.source}: {each.binding}. {each.why}")
        if not config.unused:
            show("Every binding is used.")
        return DONE
    full = configs.full_text(config, arguments.vocabulary) if arguments.full else None
    show(full or configs.dump(config.root), end="")
    return DONE


def schema(arguments: argparse.Namespace) -> int:
    """Prints the JSON schema of YAML configs, or the list of tags, for editors."""
    from trainer.config.schema import custom_tags, schema_text

    made = custom_tags if arguments.custom_tags else schema_text
    show(made(arguments.vocabulary).rstrip("\n"))
    return DONE
