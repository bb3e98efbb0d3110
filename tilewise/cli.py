"""The command line: argument parsing, exit codes and nothing else.

Exit codes: 0 done, 1 something failed, 2 the request was wrong, 130 interrupted, 141 the reader of
the output went away (`tilewise generate | head`).
"""

from __future__ import annotations

import argparse
import atexit
import gc
import os
import sys
from collections.abc import Callable, Sequence

import tilewise
from tilewise.engine.config import engine_flags
from tilewise.errors import CheckpointError, RequestError, UnsupportedError
from tilewise.flags import add_flag, as_typed, flags_of, unknown_argument

__all__ = ["main"]

OPENING = "Once upon a time"
# Shells report a process that signal s ended as 128 + s: SIGINT is 2, SIGPIPE is 13.
INTERRUPTED, BROKEN_PIPE = 128 + 2, 128 + 13
# On a busy machine of two cores a decode step of 64 sequences took 42 ms with it, 204 ms without
# (2026-11; one run each, and other values were not tried).
SPINS = 1000
_SERVE_EXTRA = {
    "fastapi",
    "starlette",
    "pydantic",
    "uvicorn",
    "h11",
    "prometheus_client",
    "msgspec",
}
_MODEL = "folder, GGUF file, owner/model[@revision] of the hub, or story, the packaged model"
_DTYPES = ("float32", "float16", "bfloat16")
# Options of the engine that `generate` offers; the others are for a server's many requests.
_OF_GENERATE = (
    "device",
    "dtype",
    "kv_cache_dtype",
    "weight_dtype",
    "block_size",
    "num_blocks",
    "max_model_len",
    "tensor_parallel_size",
    "scheduling_policy",
    "preemption",
    "victim",
    "offload_dir",
    "swap_space_gib",
    "offload_gib",
)
# Those on which the kernels of an engine depend.
_OF_PRECOMPILE = (
    "dtype",
    "kv_cache_dtype",
    "block_size",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "batch_invariant",
)
_SERVER = "http://127.0.0.1:8000"  # where `tilewise serve` listens if it is not told otherwise
_WRONG_REQUEST = (CheckpointError, RequestError, UnsupportedError, ValueError, TypeError, OSError)

_EXAMPLES = """\
examples:
  tilewise generate                                        a story from the model in the package
  tilewise generate --prompt "The dragon" --greedy         always the same continuation
  tilewise generate --model path/to/checkpoint --prompt-file chapter.txt --max-tokens 400
  tilewise generate --prompt "A" --prompt "B" -n 4 --json | jq .stats
  tilewise serve                                           the packaged model at 127.0.0.1:8000
  tilewise chat                                            talk to it
  tilewise deploy --replicas 3                             several servers behind one address
  tilewise explain cache story                             what a token costs in memory
  tilewise explain attention --shape 1,4096,4096,32,8,128 --causal
  tilewise bench ops                                       kernels against their peers
  tilewise bench attention --only dense                    attention from N = 512 on: time, memory
  tilewise simulate --trace FILE --rates 1 2 4             throughput and latency, foreseen
  tilewise precompile                                      compile the usual kernels beforehand
  tilewise precompile --arch sm89 --to kernels.zip         the same for a GPU elsewhere
  tilewise generate --prompt "A" -n 8 --trace t.jsonl      note what the scheduler decides
  tilewise replay t.jsonl                                  draw it: blocks, owners, copies over time
  tilewise verify answer.json                              compute a served answer again, to the bit
  tilewise doctor                                          what works here, to paste into an issue
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code, see the module.

    An error is printed in one sentence on standard error, and raised only with --debug; wrong
    arguments end in argparse's SystemExit.

    Args:
        argv: arguments without the program's name; None takes those of the process.
    """
    parser = _parser()
    options, unknown = parser.parse_known_args(argv)
    command: argparse.ArgumentParser = vars(options).pop("command", parser)
    if unknown:
        command.error(_unknown(options, command, unknown))
    if argv is None:  # keep Python from importing modules of the current folder
        os.environ["PYTHONSAFEPATH"] = "1"
    _tell_of_variables()
    # GNU OpenMP reads this when torch is imported. Its threads spin for milliseconds when they wait
    # for each other, and on a busy machine they take the cores from the threads that they wait for.
    os.environ.setdefault("GOMP_SPINCOUNT", str(SPINS))
    # Otherwise the interpreter collects garbage among all of torch at exit: 0.8 of 1.1 seconds
    # between the last word and the shell's prompt.
    atexit.register(gc.freeze)
    try:
        run: Callable[[argparse.Namespace], int | None] = options.run
        code = run(options)
        if sys.stdout is not None:  # it is None for a process without standard output
            sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes stdout once more at exit; send that to the null device.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except Exception as error:
        if options.debug:
            raise
        return _complain(error, command, options)
    return code or 0


def _tell_of_variables() -> None:
    """Print a warning about TILEWISE_ variables in the environment that nothing reads, such as a
    misspelt key, which would leave a server open."""
    from tilewise.server.options import unknown_variables

    said = unknown_variables()
    if said is not None and sys.stderr is not None:
        print(f"tilewise: {said}", file=sys.stderr, flush=True)


def _unknown(
    options: argparse.Namespace, command: argparse.ArgumentParser, unknown: Sequence[str]
) -> str:
    """Return the error message for arguments that the parser does not know.

    The message names the first unknown option, and the most similar option of the command.

    Args:
        options: the parsed options, of which `run` tells the command.
        command: the parser of the command.
        unknown: the arguments that were left over.
    """
    if options.run in (_serve, _deploy) and unknown[0].startswith("-"):
        from tilewise.server.options import nearest

        return nearest(unknown, command.prog.split()[-1], flags_of(command).values())
    said = unknown_argument(unknown, flags_of(command).values())
    if options.run is _generate and not unknown[0].startswith("-"):
        said += "; --model gives a model, --prompt a text"
    return said


def _complain(
    error: Exception, command: argparse.ArgumentParser, options: argparse.Namespace
) -> int:
    """Print an error in one sentence on standard error, in the words of the command line; return
    the exit code, 2 for a wrong request, else 1."""
    said = str(error)
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        said = f"{error.filename}: {error.strerror}"  # without the error number
    sentence = as_typed(" ".join(said.split()) or type(error).__name__, command, options)
    is_request = isinstance(error, _WRONG_REQUEST)
    if sys.stderr is not None:  # print(file=None) would write to standard output
        hint = "" if is_request else " (--debug shows where)"
        print(f"tilewise: {sentence}{hint}", file=sys.stderr)
    return 2 if is_request else 1


class _Formatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """A help formatter that keeps the examples' layout and appends defaults to options."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False) or action.help is None:
            return action.help
        if isinstance(action.default, list):
            return f"{action.help} (default: {' '.join(map(str, action.default))})"
        return super()._get_help_string(action)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tilewise",
        description="Efficient attention, from the kernel to the server.",
        epilog=_EXAMPLES,
        formatter_class=_Formatter,
    )
    parser.add_argument("--version", action="version", version=f"tilewise {tilewise.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_generate(commands)
    _add_serve(commands)
    _add_deploy(commands)
    _add_chat(commands)
    _add_key(commands)
    _add_bench(commands)
    _add_simulate(commands)
    _add_explain(commands)
    _add_precompile(commands)
    _add_replay(commands)
    _add_verify(commands)
    _add_doctor(commands)
    return parser


def _add_command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    summary: str,
    run: Callable[[argparse.Namespace], int | None] | None = None,
    epilog: str | None = None,
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=epilog,
        formatter_class=_Formatter,
    )
    if run is not None:
        parser.add_argument("--debug", action="store_true", help="show tracebacks")
        parser.set_defaults(run=run, command=parser)
    return parser


def _add_generate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _add_command(
        commands,
        "generate",
        "continue prompts with a model",
        _generate,
        epilog="The text goes to standard output; one line about speed and cache follows on\n"
        "standard error.",
    )
    text = parser.add_argument_group("what to continue")
    text.add_argument("--model", default="story", help=_MODEL)
    text.add_argument(
        "--prompt", action="append", metavar="TEXT", help=f"may be repeated (default: {OPENING})"
    )
    text.add_argument(
        "--prompt-file",
        action="append",
        metavar="PATH",
        help="a file that is one prompt, - for standard input; may be repeated",
    )
    how = parser.add_argument_group("how to continue it")
    how.add_argument("-n", type=int, metavar="N", default=1, help="samples for each prompt")
    how.add_argument("--max-tokens", type=int, metavar="N", default=200, help="new tokens at most")
    how.add_argument(
        "--temperature", type=float, metavar="T", default=0.8, help="divides the logits"
    )
    how.add_argument(
        "--top-p", type=float, metavar="P", default=1.0, help="smallest set this probable"
    )
    how.add_argument(
        "--top-k", type=int, metavar="K", default=0, help="the k most likely tokens; 0 is all"
    )
    how.add_argument(
        "--min-p",
        type=float,
        metavar="P",
        default=0.0,
        help="share of the best token's probability",
    )
    how.add_argument("--greedy", action="store_true", help="always the most likely token")
    how.add_argument("--seed", type=int, metavar="N", help="makes the samples reproducible")
    how.add_argument("--stop", action="append", metavar="TEXT", help="end here; may be repeated")
    how.add_argument("--ignore-eos", action="store_true", help="go on past the model's end token")
    engine = parser.add_argument_group("the engine")
    for flag in engine_flags(_OF_GENERATE):
        add_flag(engine, flag, flag.shown_default)
    shown = parser.add_argument_group("output")
    shown.add_argument("--json", action="store_true", help="one JSON object instead of text")
    shown.add_argument("--no-echo", action="store_true", help="leave the prompt out")
    shown.add_argument("--trace", metavar="FILE", help="write what the scheduler decided, as JSON")


def _generate(options: argparse.Namespace) -> None:
    from tilewise.engine.console import generate, read_prompt
    from tilewise.engine.request import SamplingParams

    params = SamplingParams(
        n=options.n,
        temperature=0.0 if options.greedy else options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        max_tokens=options.max_tokens,
        seed=options.seed,
        stop=options.stop,
        ignore_eos=options.ignore_eos,
    )
    prompts = [*(options.prompt or []), *map(read_prompt, options.prompt_file or [])]
    generate(
        options.model,
        prompts or [OPENING],
        params,
        as_json=options.json,
        echoes_prompt=not options.no_echo,
        trace=options.trace,
        **{name: vars(options)[name] for name in _OF_GENERATE},
    )


def _add_serve(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from tilewise.server.options import add_flags

    parser = _add_command(
        commands,
        "serve",
        "serve a model over HTTP, compatible with OpenAI's API",
        _serve,
        epilog="Each option is also TILEWISE_NAME in the environment and an entry of --config.",
    )
    # A prefix that is unique today may be ambiguous after the next option.
    parser.allow_abbrev = False
    parser.add_argument("MODEL", nargs="?", help=f"{_MODEL}; --model is the same")
    add_flags(parser)


def _serve(options: argparse.Namespace) -> int:
    from tilewise.server.options import model_of

    try:
        from tilewise.server.command import serve
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in _SERVE_EXTRA:
            raise
        raise UnsupportedError(
            f"serve needs the package {error.name}: pip install 'tilewise[serve]'"
        ) from None
    return serve(*model_of(vars(options)))


def _add_deploy(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from tilewise.server.options import add_flags

    parser = _add_command(
        commands,
        "deploy",
        "serve a model by several replicas behind one address, on a Ray cluster",
        _deploy,
        epilog="Run again with the same --address it replaces the replicas, one by one.",
    )
    parser.allow_abbrev = False
    parser.add_argument("MODEL", nargs="?", help="as of serve, on every node")
    group = parser.add_argument_group("the replicas")
    add = group.add_argument
    add("--replicas", type=int, default=1, metavar="N", help="servers; the fewest if scaled")
    add("--max-replicas", type=int, metavar="N", help="scale to so many, by queues and caches")
    add(
        "--routing",
        choices=("prefix", "round-robin"),
        default="prefix",
        help="which replica a request goes to",
    )
    add("--num-cpus", type=float, default=1.0, metavar="N", help="cores that each reserves")
    add("--num-gpus", type=float, metavar="N", help="GPUs of each (default: the engine's)")
    add("--upscale-delay-s", type=float, default=10.0, metavar="S", help="before one comes")
    add("--downscale-delay-s", type=float, default=300.0, metavar="S", help="before one goes")
    add(
        "--address",
        metavar="ADDRESS",
        help="of a Ray cluster, or auto; the application stays there (default: one that is "
        "started on this machine)",
    )
    add_flags(parser)


def _deploy(options: argparse.Namespace) -> int:
    from tilewise.server.options import model_of

    try:
        from tilewise.cluster.command import deploy
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package not in _SERVE_EXTRA | {"ray"}:
            raise
        raise UnsupportedError(
            f"deploy needs the package {error.name}: pip install 'tilewise[ray]'"
        ) from None
    return deploy(*model_of(vars(options)))


def _add_chat(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _add_command(commands, "chat", "talk to a server in the terminal", _chat)
    parser.add_argument(
        "URL", nargs="?", help=f"address of the server, also as --url (default: {_SERVER})"
    )
    parser.add_argument("--url", help="the same; without http:// it is added")
    parser.add_argument("--port", type=int, metavar="N", help="of a server on this machine")
    parser.add_argument("--api-key", metavar="KEY", help="(default: TILEWISE_API_KEY)")
    parser.add_argument("--model", metavar="NAME", help="where the server has several names")
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help="new tokens of an answer at most (2048)"
    )
    parser.add_argument("--temperature", type=float, metavar="T", help="divides the logits")


def _chat(options: argparse.Namespace) -> int:
    from tilewise.server.terminal import chat, with_scheme

    here = None if options.port is None else f"http://127.0.0.1:{options.port}"
    addresses = {with_scheme(x) for x in (options.URL, options.url, here) if x is not None}
    if len(addresses) > 1:
        raise ValueError(f"--url must be one address, got {' and '.join(sorted(addresses))}")
    names = ("model", "max_tokens", "temperature")
    settings = {n: getattr(options, n) for n in names if getattr(options, n) is not None}
    return chat(addresses.pop() if addresses else _SERVER, options.api_key, settings)


def _add_key(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _add_command(commands, "key", "draw a key for a server's --keys-file", _key)
    parser.add_argument("name", help="of the key, in logs and metrics")


def _key(options: argparse.Namespace) -> None:
    import json

    from tilewise.server.keys import MAX_NAME, hash_of, new_key

    if not 1 <= len(options.name) <= MAX_NAME:
        raise ValueError(f"name must be 1 ... {MAX_NAME} characters, got {len(options.name)}")
    if not options.name.isprintable():
        raise ValueError(f"name must be of printable characters, got {options.name!r}")
    key = new_key()
    # Not on standard output: `tilewise key alice >> keys.toml` would store it in the file.
    print(f"The key, which is kept nowhere: {key}", file=sys.stderr)
    print(f'[keys.{json.dumps(options.name, ensure_ascii=False)}]\nhash = "{hash_of(key)}"')


def _add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _add_command(commands, "bench", "measure this machine, beside its peers", _bench)
    parser.add_argument(
        "what",
        choices=(
            "ops",
            "attention",
            "engine",
            "train",
            "waste",
            "machine",
            "serve",
        ),
        help="what to measure",
    )
    parser.add_argument(
        "rest", nargs=argparse.REMAINDER, metavar="...", help="its own options; try ops --help"
    )


def _bench(options: argparse.Namespace) -> int | None:
    from importlib import import_module

    main_of: Callable[[Sequence[str]], int | None] = import_module(
        f"tilewise.bench.{options.what}"
    ).main
    return main_of(options.rest)


def _add_simulate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    # No abbreviations: all that follows belongs to the simulation's own parser.
    parser = commands.add_parser(
        "simulate", help="serve a trace in virtual time", prefix_chars="\0", add_help=False
    )
    parser.add_argument("rest", nargs="*")
    parser.set_defaults(run=_simulate, debug=False)


def _simulate(options: argparse.Namespace) -> int:
    from tilewise.bench.simulate import main as simulate

    return simulate(options.rest)


def _add_explain(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _add_command(commands, "explain", "say what something costs before it runs")
    topics = parser.add_subparsers(title="topics", metavar="TOPIC", required=True)
    attention = _add_command(
        topics, "attention", "backend, tiles, FLOPs and bytes of one call", _explain_attention
    )
    attention.add_argument(
        "--shape",
        required=True,
        type=_shape,
        metavar="B,SQ,SK,HQ,HK,D",
        help="batch, queries, keys, query heads, key heads, channels; e.g. 1,4096,4096,32,8,128",
    )
    attention.add_argument(
        "--dtype", default="float32", choices=_DTYPES, help="of queries, keys and values"
    )
    attention.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1 ...")
    attention.add_argument("--causal", action="store_true", help="keys after a query are hidden")
    attention.add_argument(
        "--window", type=int, metavar="N", help="keys that a query sees, its own included"
    )
    cache = _add_command(topics, "cache", "memory of a model's keys and values", _explain_cache)
    cache.add_argument("MODEL", nargs="?", help=f"{_MODEL} (default)")
    cache.add_argument("--model", default=None, help="the same")
    for flag in engine_flags(("block_size",)):
        add_flag(cache, flag, flag.shown_default)
    cache.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", *_DTYPES, "int8", "fp8_e4m3", "int4"),
        help="of the cache",
    )


def _shape(text: str) -> tuple[int, ...]:
    """Parse "B,SQ,SK,HQ,HK,D", six sizes separated by commas, for argparse; ArgumentTypeError for
    other texts."""
    parts = text.split(",")
    if len(parts) != 6 or not all(part.strip().isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"must be six sizes B,SQ,SK,HQ,HK,D, got {text!r}")
    return tuple(map(int, parts))


def _explain_attention(options: argparse.Namespace) -> None:
    from tilewise.engine.console import explain_attention

    explain_attention(
        options.shape,
        dtype=options.dtype,
        device=options.device,
        causal=options.causal,
        window=options.window,
    )


def _explain_cache(options: argparse.Namespace) -> None:
    from tilewise.engine.console import explain_cache
    from tilewise.server.options import once

    explain_cache(once(options.MODEL, options.model) or "story", options.block_size, options.dtype)


def _add_precompile(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _add_command(
        commands, "precompile", "compile the usual kernels before they are needed", _precompile
    )
    parser.add_argument(
        "--head-dims",
        nargs="+",
        type=int,
        metavar="D",
        default=[64, 128, 256],
        help="channels of a head",
    )
    parser.add_argument(
        "--dtypes", nargs="+", choices=_DTYPES, default=["bfloat16"], help="of q, k and v"
    )
    parser.add_argument("--device", help="cuda or cpu (default: a GPU where there is one)")
    parser.add_argument("--forward-only", action="store_true", help="leave the gradients out")
    parser.add_argument("--workers", type=int, metavar="N", help="processes (default: one a core)")
    elsewhere = parser.add_argument_group(
        "for another machine",
        "Compile for a GPU that is not here, into a file; there --from puts its kernels into "
        "Triton's cache.",
    )
    elsewhere.add_argument(
        "--arch", metavar="ARCH", help="architecture to compile for, such as sm89; needs --to"
    )
    elsewhere.add_argument("--to", metavar="FILE", help="the file to write")
    elsewhere.add_argument("--from", dest="source", metavar="FILE", help="a file to take")
    elsewhere.add_argument(
        "--sm-count", type=int, metavar="N", help="multiprocessors of that GPU (default: the most)"
    )
    elsewhere.add_argument(
        "--model", metavar="MODEL", help=f"compile what its engine needs instead: {_MODEL}"
    )
    for flag in engine_flags(_OF_PRECOMPILE):
        add_flag(elsewhere, flag, flag.shown_default)


def _precompile(options: argparse.Namespace) -> int:
    from tilewise.engine.console import precompile, precompile_for, take_kernels

    if options.source is not None:
        if options.arch is not None or options.to is not None:
            raise RequestError("--from must come without --arch and --to")
        return take_kernels(options.source)
    if (options.arch is None) != (options.to is None):
        raise RequestError("--arch and --to must come together")
    if options.arch is not None:
        engine = None
        if options.model is not None:
            engine = {name: vars(options)[name] for name in ("model", *_OF_PRECOMPILE)}
        return precompile_for(
            options.arch,
            options.to,
            head_dims=options.head_dims,
            dtypes=options.dtypes,
            needs_backward=not options.forward_only,
            options=engine,
            sm_count=options.sm_count,
            workers=options.workers,
        )
    if options.model is not None:
        raise RequestError("--model must come with --arch and --to")
    return precompile(
        head_dims=options.head_dims,
        dtypes=options.dtypes,
        device=options.device,
        needs_backward=not options.forward_only,
        workers=options.workers,
    )


def _add_replay(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _add_command(
        commands, "replay", "draw what the cache held over time, from a trace", _replay
    )
    parser.add_argument("trace", metavar="TRACE", help="a file that generate --trace has written")
    parser.add_argument("--out", metavar="FILE", help="the picture (default: TRACE with .png)")


def _replay(options: argparse.Namespace) -> None:
    from pathlib import Path

    from tilewise.engine.record.replay import replay
    from tilewise.engine.record.replay_plot import draw, summary
    from tilewise.engine.record.trace import read_trace

    timeline = replay(read_trace(options.trace))
    out = Path(options.out) if options.out else Path(options.trace).with_suffix(".png")
    draw(timeline, out)
    print(summary(timeline))
    print(out)


def _add_verify(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _add_command(
        commands,
        "verify",
        "compute the answer of a recipe again, and compare it to the bit",
        _verify,
        epilog="The exit code is 0 where all is equal, 1 where it differs, 2 where the recipe is "
        "of other weights or another class, or was changed.",
    )
    parser.add_argument(
        "recipe", help="file with a recipe, or with an answer that has one; - is stdin"
    )
    parser.add_argument("--model", default="story", help=_MODEL)
    parser.add_argument("--device", default="auto", metavar="NAME", help="device that computes")
    parser.add_argument(
        "--lora-modules", nargs="+", metavar="NAME=PATH", help="adapters that the recipe may name"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a sentence")


def _verify(options: argparse.Namespace) -> int:
    from tilewise.engine.console import verify

    return verify(
        options.recipe,
        options.model,
        device=options.device,
        lora_modules=options.lora_modules,
        as_json=options.json,
    )


def _add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _add_command(
        commands,
        "doctor",
        "say what works on this machine, to paste into an issue",
        _doctor,
        epilog="The exit code is 1 where something does not work.",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parser.add_argument(
        "--seconds",
        type=float,
        metavar="S",
        default=20.0,
        help="time of the self-test; 0 leaves it out",
    )


def _doctor(options: argparse.Namespace) -> int:
    from tilewise.doctor.report import doctor

    return doctor(as_json=options.json, seconds=options.seconds)
