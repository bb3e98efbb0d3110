"""Run `tilewise serve` once its options are parsed: check, load, listen, serve."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import math
import os
import re
import ssl
import sys
import threading
import time
import webbrowser
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tilewise.engine.config import Modules, engine_flags
from tilewise.server.adapters import adapters_router
from tilewise.server.app import build_app
from tilewise.server.bridge import AsyncEngine, Bridge, Loop
from tilewise.server.chat import (
    ChatTemplate,
    added_tokens,
    model_type_of,
    named_templates,
    read_template,
)
from tilewise.server.chat_format import call_names, format_of, reasoning_names, told, unread
from tilewise.server.embeddings import embeddings_router
from tilewise.server.garbage import collect_when_idle, leaving_large_ones
from tilewise.server.keys import MIN_KEY, Caller, KeyRing, hash_of, read_keys
from tilewise.server.limits import Queue, RequestLimits
from tilewise.server.live import live_router
from tilewise.server.messages import messages_router
from tilewise.server.metrics import Metrics
from tilewise.server.options import FLAGS, resolve
from tilewise.server.responses import responses_router
from tilewise.server.routes import admin_router
from tilewise.server.run import Server, ServerOptions, bind, run
from tilewise.server.scoring import scoring_router
from tilewise.server.service import Service
from tilewise.server.spans import open_spans
from tilewise.server.weights import weights_router

__all__ = ["Steps", "application", "checked", "name_of", "new_service", "serve"]

CLOSE_S = 2.0  # seconds for the engine to close when requests have used up the shutdown timeout
API_KEY = "api-key"  # the caller's name for the key of --api-key
_LEVELS = ("debug", "info", "warning", "error")


class Steps:
    """Report on standard error what the start does and how long each step took."""

    def __init__(self) -> None:
        self.begun = self._last = time.perf_counter()

    def done(self, what: str) -> None:
        """Print that the step `what` has ended, with the seconds since the last one ended."""
        now = time.perf_counter()
        print(f"tilewise: {what} in {now - self._last:.2f} s", file=sys.stderr, flush=True)
        self._last = now

    def parts(self, seconds: Mapping[str, float]) -> None:
        """Print the seconds of each part, by its description, of the step that `done` reports
        next."""
        for what, spent in seconds.items():
            print(f"tilewise:   {what} in {spent:.2f} s", file=sys.stderr, flush=True)


def serve(model: str, given: Mapping[str, Any]) -> int:
    """Run `tilewise serve`: load a model and serve it until the process is told to stop.

    Args:
        model: a folder, a GGUF file, a name on the hub, or "story", the packaged model.
        given: options by name, see `options.FLAGS`; a missing option is read from the environment
            or the configuration file, or has its default.

    Returns:
        The exit code.

    Raises:
        ValueError: an option is wrong, the port is in use, or the model does not fit.
    """
    steps = Steps()
    options, keys = checked(given)
    tls = _tls(options)
    sock = bind(options["host"], options["port"])
    try:
        service, close = new_service(model, options, keys, steps)
    except BaseException:
        sock.close()
        raise
    address, port = sock.getsockname()[:2]
    shown = f"[{address}]" if ":" in address else address
    url = f"{'https' if tls else 'http'}://{shown}:{port}"

    collecting: list[asyncio.Task[None]] = []  # the event loop keeps only weak references to tasks

    def started() -> None:
        loop = asyncio.get_running_loop()
        collecting.append(loop.create_task(collect_when_idle(lambda: not service.bridge.jobs)))
        steps.done("ready")
        total = time.perf_counter() - steps.begun
        access = f"{len(keys)} key{'s' * (len(keys) > 1)}" if keys else "no key needed"
        print(
            f"tilewise: serving {service.names[0]} at {url} ({access}), {total:.2f} s after the "
            "start",
            file=sys.stderr,
            flush=True,
        )
        if options["demo"]:
            # Runs beside the event loop: a browser that has to be started first answers late.
            threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()

    server = Server(
        application(service),
        service.bridge,
        ServerOptions(shutdown_timeout_s=options["shutdown_timeout"], tls=tls),
        on_started=started,
    )
    try:
        with leaving_large_ones():
            return run(server, sock)
    finally:
        # The cache's files are written within this time, too.
        close(max(server.seconds_left, min(CLOSE_S, options["shutdown_timeout"])))


def checked(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Caller]]:
    """Return all options by name, and the callers by the hash of their key.

    Logging is set up, at the level of the options.

    Args:
        given: the options by name, see `serve`.

    Raises:
        ValueError: an option is wrong, or the address is public and no key is required.
    """
    options = resolve(given)
    _check(options)
    keys = _keys(options)
    host = options["host"]
    if not keys and not options["allow_open"] and not _is_loopback(host):
        raise ValueError(
            "--host must be of this machine alone unless --api-key, --keys-file or --allow-open "
            f"is given, got {host}"
        )
    return options, keys


def application(service: Service) -> Any:
    """Return the ASGI application of a service, with all its routes."""
    routers = (
        adapters_router,
        admin_router,
        embeddings_router,
        live_router,
        messages_router,
        responses_router,
        scoring_router,
        weights_router,
    )
    return build_app(service, [router(service) for router in routers])


def _check(options: Mapping[str, Any]) -> None:
    choices = {
        "log_level": _LEVELS,
        "tool_call_parser": ("auto", "none", *call_names()),
        "reasoning_parser": ("auto", "none", *reasoning_names()),
        "generation_config": ("auto", "none"),
        "load_format": ("auto", "dummy"),
    }
    for name, allowed in choices.items():
        if options[name] not in allowed:
            asked = "--" + name.replace("_", "-")
            raise ValueError(f"{asked} must be one of {', '.join(allowed)}, got {options[name]}")
    for origin in options["allowed_origins"] or ():
        if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#\s]+", origin, re.I):
            raise ValueError(
                "--allowed-origins must be origins such as https://example.com, or *, got "
                f"{origin!r}"
            )
    share = options["stream_share"]
    if share is not None and not 0 < share <= 1:
        raise ValueError(f"--stream-share must be above 0 and at most 1, got {share}")
    longest = options["request_timeout"]
    if longest is not None and not 0 < longest < math.inf:
        raise ValueError(f"--request-timeout must be above 0 and finite, got {longest}")
    if not 0 <= options["port"] < 65536:
        raise ValueError(f"--port must be in 0 ... 65535, got {options['port']}")
    for flag in FLAGS:
        value = options[flag.name]
        if flag.group == "limits" and value is not None and value < 1:
            raise ValueError(f"{flag.flag} must be at least 1, got {value}")
        if flag.kind is float and value is not None and not value >= 0:
            raise ValueError(f"{flag.flag} must be at least 0, got {value}")
    logging.basicConfig(
        stream=sys.stderr,
        level=options["log_level"].upper(),
        format="%(asctime)s %(levelname)s %(message)s",
    )
    if options["log_level"] == "info":
        # `Steps` has reported the start already
        logging.getLogger("uvicorn").setLevel(logging.WARNING)


def _keys(options: Mapping[str, Any]) -> dict[str, Caller]:
    callers: dict[str, Caller] = {}
    if options["keys_file"] is not None:
        path = Path(options["keys_file"])
        if not path.is_file():
            raise ValueError(f"--keys-file must be a file, got {path}")
        callers.update(read_keys(path))
    if options["api_key"] is not None:
        if len(options["api_key"]) < MIN_KEY:
            raise ValueError(
                f"--api-key must be at least {MIN_KEY} characters, so that it is not guessed, got "
                f"{len(options['api_key'])}"
            )
        if not re.fullmatch("[!-~]+", options["api_key"]):
            # Clients encode other characters differently, and spaces around a header's value are
            # dropped.
            raise ValueError("--api-key must be of ASCII letters, digits and signs, got others")
        # Otherwise this key would share that caller's cached prefixes and share of tokens, or the
        # caller's key would become an administrator's.
        digest, names = hash_of(options["api_key"]), {caller.name for caller in callers.values()}
        if digest in callers or API_KEY in names:
            which = "key" if digest in callers else f"name, {API_KEY},"
            raise ValueError(f"--api-key must have a {which} that --keys-file has not")
        callers[digest] = Caller(name=API_KEY, admin=True)
    return callers


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _tls(options: Mapping[str, Any]) -> ssl.SSLContext | None:
    key, certificate = options["ssl_keyfile"], options["ssl_certfile"]
    if key is None and certificate is None:
        return None
    if certificate is None:
        raise ValueError("--ssl-certfile must be given with --ssl-keyfile")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2

    # without it OpenSSL would ask on a terminal that nobody may be watching
    def passphrase() -> str:
        raise ValueError(
            "--ssl-keyfile must be a key without a passphrase, got one that has it: "
            "openssl pkey -in KEY -out PLAIN writes one without"
        )

    try:
        context.load_cert_chain(certificate, key, passphrase)
    except (OSError, ssl.SSLError) as error:
        raise ValueError(
            f"--ssl-certfile and --ssl-keyfile must be a certificate and its key, got {error}"
        ) from None
    return context


def new_service(
    model: str, options: Mapping[str, Any], keys: dict[str, Caller], steps: Steps
) -> tuple[Service, Callable[[float], object]]:
    """Load a model; return the service, and a function that closes its engine within given seconds.

    The process that renders chat templates is started, and remarks on the model's formats are
    printed.

    Args:
        model: a folder, a GGUF file, a name on the hub, or "story", the packaged model.
        options, keys: the results of `checked`.
        steps: the reporter of the start's steps.

    Raises:
        ValueError: an option is wrong, or the model does not fit.
    """
    from tilewise.engine.async_llm import AsyncLLM
    from tilewise.engine.llm import LLM
    from tilewise.engine.purpose import read_purpose
    from tilewise.engine.sampling_defaults import sampling_defaults
    from tilewise.engine.settings import compute_device, model_directory
    from tilewise.engine.usual_steps import warm_up

    steps.done("libraries imported")
    settings = {
        flag.name: options[flag.name] for flag in engine_flags() if options[flag.name] is not None
    }
    if options["load_format"] == "dummy":
        settings["random_weights"] = True
    settings |= _settings_of_keys(keys, options["scheduling_policy"])
    directory = model_directory(model)
    source, tokens = read_template(directory, options["chat_template"])
    template = ChatTemplate(
        source,
        tokens,
        allows_others=options["trust_request_chat_template"],
        named={} if options["chat_template"] is not None else named_templates(directory),
    )
    templates = "\n".join(template.sources)
    form = format_of(
        templates,
        options["tool_call_parser"],
        options["reasoning_parser"],
        tokens=added_tokens(directory),
        model_type=model_type_of(directory),
    )
    template.calls = form.calls
    names = options["served_model_name"] or [name_of(model, directory)]
    adapters = dict(Modules.pairs("--lora-modules", options["lora_modules"]))
    for name in adapters:
        if name in names:
            raise ValueError(f"--lora-modules must have names that the model has not, got {name}")
    endpoint = options["otlp_traces_endpoint"]
    spans = None if endpoint is None else open_spans(endpoint, names[0])
    engine: AsyncEngine
    loop: Loop
    close: Callable[[float], object]
    slow = ""
    is_apart = options["engine_process"]
    if is_apart is None:
        # A GPU's steps are short, and each would wait for the interpreter lock that HTTP holds. On
        # a CPU the engine needs the cores that a second process would take.
        is_apart = compute_device(settings.get("device", "auto")).type == "cuda"
    if is_apart:
        from tilewise.server.engine_process.remote import RemoteEngine

        engine = loop = remote = RemoteEngine(model, settings, share=options["stream_share"])
        devices, close = f"{remote.devices}, in process {remote.pid}", remote.close
        steps.parts(remote.start_seconds)
    else:
        llm = LLM(model, **settings)
        warm_up(llm)
        engine, loop = AsyncLLM(llm, share=options["stream_share"]), llm.loop
        devices, close = llm.devices, llm.close
        steps.parts(llm.start_seconds)
        reason = llm.engine.stats().why_not_compiled
        slow = f"; steps run op by op, which is slower: {reason}" if reason else ""
    sizes = engine.limits
    room = f"a cache of {sizes.num_blocks * sizes.block_size:,} tokens"
    if sizes.is_encoder:
        room = f"steps of up to {sizes.max_num_batched_tokens:,} tokens without a cache,"
    steps.done(f"engine ready, {room} on {devices}{slow}")
    purpose = read_purpose(
        directory,
        engine.tokenizer,
        score_tokens=options["score_tokens"],
        pair_template=options["pair_template"],
    )
    if "generate" not in purpose.tasks:
        print(f"tilewise: {purpose.name} is to {purpose.verbs}", file=sys.stderr, flush=True)
    bridge = Bridge(
        engine,
        loop,
        queue=Queue(
            max_requests=options["max_num_queued_reqs"],
            max_tokens=options["max_num_queued_tokens"],
            max_key_requests=options["max_key_queued_reqs"],
            max_key_tokens=options["max_key_queued_tokens"],
        ),
        limits=RequestLimits(
            max_body_bytes=options["max_body_bytes"],
            max_samples=options["max_samples"],
            max_prompt_tokens=options["max_prompt_tokens"],
            max_timeout_s=options["request_timeout"],
        ),
        metrics=Metrics(names[0], engine.stats),
        slow_reader_s=options["slow_reader_s"],
        stall_s=options["stall_s"],
        spans=spans,
    )
    if template.sources or template.allows_others:
        template.renderer.start()
        steps.done("chat template's process started")
    formats = [told(form)] if "generate" in purpose.tasks and templates else []
    for remark in (*formats, *template.faults(), *unread(templates, form)):
        print(f"tilewise: {remark}", file=sys.stderr, flush=True)
    service = Service(
        bridge,
        names,
        template,
        adapters=adapters,
        keys=KeyRing(keys),
        changes_weights=options["enable_weight_updates"],
        shows_text=options["show_text"],
        is_for_this_machine=not keys and not options["allow_open"],
        allowed_origins=frozenset(o.lower() for o in options["allowed_origins"] or ()),
        purpose=purpose,
        defaults=sampling_defaults(directory) if options["generation_config"] == "auto" else {},
        form=form,
    )
    return service, close


def name_of(model: str, directory: Path) -> str:
    """Return the default name of a model for clients.

    It is the name of a directory, however its path is written, the name of a GGUF file without its
    ending, and otherwise the model as the user wrote it.

    Args:
        model: the model as the user wrote it.
        directory: the directory it resolves to; inside the package for one of the package's models.
    """
    if Path(model) != directory:
        is_gguf = model.lower().endswith(".gguf") and Path(model).is_file()
        return Path(model).stem if is_gguf else model
    # the name of a link itself, not of its target
    return Path(os.path.abspath(directory)).name or "model"


def _settings_of_keys(keys: Mapping[str, Caller], policy: str | None) -> dict[str, Any]:
    """Return the engine settings of the fair policy if a key has a weight other than 1.

    Args:
        keys: the callers by the hash of their key; a caller's weight is its share of tokens.
        policy: the value of --scheduling-policy; None where the option was not given.

    Returns:
        scheduling_policy, which is "fair", and user_weights, the weights other than 1 by the names
        of their callers; an empty dict if all weights are 1.

    Raises:
        ValueError: a key has a weight other than 1, and the given policy is not "fair".
    """
    weights = {caller.name: caller.weight for caller in keys.values() if caller.weight != 1}
    if not weights:
        return {}
    if policy not in (None, "fair"):
        named = ", ".join(sorted(weights))
        raise ValueError(
            f"--scheduling-policy must be fair where keys have weights ({named}), got {policy}"
        )
    return {"scheduling_policy": "fair", "user_weights": weights}
