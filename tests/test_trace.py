"""`vllm-rocm-fixes trace`: real process trees, a real `vllm serve`, and its page in a real browser."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
import urllib.request
from pathlib import Path

import browser
import pytest
from releases import tree

from vllm_rocm_fixes import node, traces

TRACE = [sys.executable, "-m", "vllm_rocm_fixes", "trace"]


@pytest.fixture
def env():
    return {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", traces.VARIABLE)}


def traced(tmp_path, env, command, *options):
    """The report on a command that was traced, and the finished process."""
    report = tmp_path / "report.json"
    done = subprocess.run(
        [*TRACE, "--json", "--output", str(report), *options, "--", *command],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    return json.loads(report.read_text()), done


def script(tmp_path, text, name="program.py"):
    path = tmp_path / name
    path.write_text(textwrap.dedent(text))
    return str(path)


def line_of(path, text):
    with open(path) as file:
        [number] = [n for n, line in enumerate(file, 1) if text in line]
    return f"{path}:{number}"


@pytest.mark.unit
def test_who_imported_what_in_the_whole_tree(tmp_path, env):
    (tmp_path / "aiter.py").touch()
    (tmp_path / "tilelang.py").write_text("import os\nos.environ['PYTHONPATH'] = '/tvm:' + os.environ['PYTHONPATH']\n")
    program = script(
        tmp_path,
        """
        import multiprocessing, os, subprocess, sys

        def probe():
            import aiter  # the probe

        def child():
            import tilelang  # in the child

        if __name__ == "__main__":
            spawned = multiprocessing.get_context("spawn").Process(target=child, name="spawned")
            spawned.start()
            spawned.join()
            probe()
            if os.fork() == 0:
                os.environ["LD_LIBRARY_PATH"] = "/somewhere"  # after the fork
                import mori_that_is_not_there
            os.wait()
            subprocess.run(["sh", "-c", sys.executable + " -c 'import aiter'"], check=True)
        """,
    )
    env |= {"PYTHONPATH": str(tmp_path)}
    report, _ = traced(tmp_path, env, [sys.executable, program], "--watch", "mori_that_is_not_there")
    assert report["status"] == 0 and report["overhead"]["seconds"] > 0
    by_name = {p["name"]: p for p in report["processes"] if p["kind"] != "fork"}
    [fork] = [p for p in report["processes"] if p["kind"] == "fork"]
    main, spawned = by_name[f"{os.path.basename(sys.executable)} program.py"], by_name["spawned"]
    shell = next(p for name, p in by_name.items() if name.endswith("-c import aiter"))
    assert {p["parent"] for p in (fork, spawned, shell)} == {main["pid"]}

    [aiter] = main["hazards"]
    assert aiter["name"] == "aiter" and aiter["first"] and aiter["outcome"] == "ok" and aiter["seconds"] > 0
    assert aiter["chain"][-1] == f"{line_of(program, '# the probe')} probe"
    assert [h["first"] for h in shell["hazards"] if h["name"] == "aiter"] == [False]
    tilelang = next(h for h in spawned["hazards"] if h["name"] == "tilelang")
    assert tilelang["chain"][-1] == f"{line_of(program, '# in the child')} child"
    [variable] = [v for v in spawned["variables"] if v["name"] == "PYTHONPATH"]
    assert (variable["old"], variable["new"]) == (str(tmp_path), f"/tvm:{tmp_path}")
    assert variable["chain"][-1] == f"{tmp_path}/tilelang.py:2 <module>"
    assert str(traces.TRACER) not in json.dumps(report)

    assert fork["inherited"] == ["aiter"] and fork["hazards"] == []
    assert fork["tried"][0]["name"] == "mori_that_is_not_there"
    assert fork["tried"][0]["outcome"] == "ModuleNotFoundError"
    [changed] = fork["variables"]
    assert (changed["name"], changed["new"]) == ("LD_LIBRARY_PATH", "/somewhere")
    assert changed["chain"][-1].startswith(line_of(program, "# after the fork"))


@pytest.mark.unit
def test_the_tree_for_a_person(tmp_path, env):
    (tmp_path / "aiter.py").touch()
    program = script(tmp_path, "import os\nif os.fork() == 0:\n    import aiter\nelse:\n    os.wait()\n")
    done = subprocess.run([*TRACE, "--", sys.executable, program], env=env, capture_output=True, text=True, check=False)
    assert re.search(
        r"^2 processes, \d+ imports?, [\d.]+ s, exit status 0; the tracer took [\d.]+ s", done.stdout, re.M
    )
    assert re.search(r"^    \d+ .*, fork at \+", done.stdout, re.M)
    assert re.search(
        r"imports aiter, first of all \([\d.]+ s, \d+ MB\)\n\s+\S+program.py:3 <module>$", done.stdout, re.M
    )
    done = subprocess.run([*TRACE, "--", "true"], env=env, capture_output=True, text=True, check=False)
    assert "No Python process was traced" in done.stdout


@pytest.mark.unit
def test_the_command_runs_unchanged(tmp_path, env):
    """Output, path, modules, traceback and warnings of a program are what they are without the tracer."""
    (tmp_path / "broken.py").write_text("import warnings\nwarnings.warn('look', stacklevel=2)\nimport not_there\n")
    (tmp_path / "worse.py").write_text("1 / 0\n")
    program = script(
        tmp_path,
        """
        import sys, traceback
        print(sys.path, sorted(m for m in sys.modules if "rocm_fixes" not in m), sys.argv, sys.flags)
        for module in ("broken", "worse"):
            try:
                __import__(module)
            except Exception:
                traceback.print_exc()
        print(sys.stdin.read())
        raise SystemExit(7)
        """,
    )
    command = [sys.executable, "-W", "always", program, "--", "--json"]
    outputs = []
    for start in ([], [*TRACE, "--output", str(tmp_path / "report"), "--"]):
        done = subprocess.run(start + command, env=env, input="words", capture_output=True, text=True, check=False)
        modules = re.sub(r"'(__future__|atexit|sitecustomize)', ", "", done.stdout)  # what the tracer needs
        outputs.append((done.returncode, modules, done.stderr))
    assert outputs[0] == outputs[1]
    assert outputs[0][0] == 7 and "ZeroDivisionError" in outputs[0][2] and "broken.py:2" not in outputs[0][2]


@pytest.mark.unit
def test_stdout_is_json_alone(env):
    done = subprocess.run(
        [*TRACE, "--json", "--", "echo", "words"], env=env, capture_output=True, text=True, check=False
    )
    assert json.loads(done.stdout)["command"] == ["echo", "words"] and done.stderr == "words\n"


@pytest.mark.unit
def test_exit_status_and_signals(tmp_path, env):
    assert traced(tmp_path, env, ["sh", "-c", "kill -9 $$"])[1].returncode == 137
    done = subprocess.run([*TRACE, "--", "no-such-program"], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "vllm-rocm-fixes: no-such-program can't be started: No such file or directory\n"
    code = "import signal, sys; signal.signal(15, lambda *_: sys.exit(3)); print('ready', flush=True); signal.pause()"
    process = subprocess.Popen([*TRACE, "--", sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    report = process.stdout.read()
    process.stdout.close()
    assert process.wait(20) == 3 and "exit status 3" in report


@pytest.mark.unit
def test_the_machines_own_sitecustomize_still_runs(tmp_path, env):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("import builtins\nbuiltins.own = __file__\n")
    code = "import sys; print(own, sys.modules['sitecustomize'].__file__)"
    command = [sys.executable, "-c", code]
    _, done = traced(tmp_path, env | {"PYTHONPATH": str(tmp_path / "own")}, command)
    assert done.stdout.split() == [str(tmp_path / "own" / "sitecustomize.py")] * 2
    (tmp_path / "own" / "sitecustomize.py").write_text("raise RuntimeError('of the machine')\n")
    _, done = traced(tmp_path, env | {"PYTHONPATH": str(tmp_path / "own")}, [sys.executable, "-c", "print(1)"])
    assert done.stdout == "1\n" and "RuntimeError: of the machine" in done.stderr


@pytest.mark.unit
def test_what_cannot_be_seen_is_named(tmp_path, env):
    program = script(
        tmp_path,
        """
        import subprocess, sys
        subprocess.run([sys.executable, "-I", "-c", "pass"])
        subprocess.run([sys.executable, "-c", "pass"], env={})
        subprocess.run([sys.executable, "-c", "pass"])
        subprocess.run(["true"])
        """,
    )
    report, _ = traced(tmp_path, env, [sys.executable, program])
    assert [n["why"] for n in report["processes"][0]["not_traced"]] == [
        "it runs with -I",
        "it was given an environment of its own",
    ]


@pytest.mark.unit
def test_nothing_is_lost_when_a_process_is_killed(tmp_path, env):
    (tmp_path / "aiter.py").write_text("import json\nimport os\nos.kill(os.getpid(), 9)\n")
    report, done = traced(
        tmp_path, env, [sys.executable, "-c", f"import sys; sys.path.append('{tmp_path}'); import aiter"]
    )
    [process] = report["processes"]
    assert done.returncode == 137
    assert [(h["name"], h["outcome"]) for h in process["hazards"]] == [("aiter", "not ended")]
    assert process["imports"] > 3


@pytest.mark.unit
def test_a_program_that_closes_all_files_is_left_alone(tmp_path, env):
    """Our file's number may be used again by the program: nothing is written there."""
    program = script(
        tmp_path,
        f"""
        import os
        os.closerange(3, 1024)
        other = os.open("{tmp_path}/other", os.O_RDWR | os.O_CREAT)
        os.dup2(other, 873)
        import json, sqlite3
        print(os.fstat(other).st_size)
        """,
    )
    _, done = traced(tmp_path, env, [sys.executable, program])
    assert done.stdout == "0\n" and done.returncode == 0


@pytest.mark.unit
def test_devices_libraries_and_dlopen_flags(tmp_path, env):
    """A package whose C code opens the device, as a HIP runtime does: seen after its import, and in what is forked."""
    device = tmp_path / "kfd"
    device.touch()
    (tmp_path / "aiter.py").write_text(f"import os\nos.open('{device}', os.O_RDONLY)\n")
    program = script(
        tmp_path,
        """
        import ctypes, os, sys
        flags = sys.getdlopenflags()
        sys.setdlopenflags(flags | os.RTLD_GLOBAL)  # changed
        sys.setdlopenflags(flags)
        ctypes.CDLL("libc.so.6")
        ctypes.CDLL("libc.so.6", os.RTLD_GLOBAL)  # for all
        import aiter
        if os.fork() == 0:
            import json
            os._exit(0)
        os.wait()
        """,
    )
    report, _ = traced(tmp_path, env, [sys.executable, program], "--device", str(device))
    main, fork = report["processes"]
    assert [(d["name"], d["outcome"]) for d in main["devices"]] == [(str(device), "the import of aiter")]
    assert not main["forked_with_gpu"] and fork["forked_with_gpu"]
    changed = main["dlopen_flags"][0]
    assert int(changed["new"]) == int(changed["old"]) | os.RTLD_GLOBAL and len(main["dlopen_flags"]) == 2
    assert changed["chain"][-1].startswith(line_of(program, "# changed"))
    [library] = main["global_libraries"]
    assert library["name"] == "libc.so.6" and any(line_of(program, "# for all") in frame for frame in library["chain"])


def test_who_asked_for_the_gpu(tmp_path, env):
    """Real torch: its own _lazy_init, reached through a name that was imported from it, and again after a fork."""
    program = script(
        tmp_path,
        """
        import os
        from torch.cuda import _lazy_init
        import torch

        def ask():
            try:
                torch.zeros(1, device="cuda")  # asks
            except (AssertionError, RuntimeError) as error:
                print(type(error).__name__, error)

        ask()
        ask()
        before = _lazy_init.__code__.co_filename
        if os.fork() == 0:
            try:
                _lazy_init()  # in the fork
            except (AssertionError, RuntimeError):
                pass
            os._exit(0)
        os.wait()
        """,
    )
    report, done = traced(tmp_path, env, [sys.executable, program])
    main, fork = report["processes"]
    plain = subprocess.run([sys.executable, program], env=env, capture_output=True, text=True, check=False)
    assert done.stdout == plain.stdout and done.stdout.count("\n") == 2
    [asked] = main["gpu"]
    assert asked["name"] == "torch.cuda._lazy_init" and asked["outcome"] in done.stdout.replace(" ", ": ", 1)
    assert asked["chain"][-1] == f"{line_of(program, '# asks')} ask"
    [again] = fork["gpu"]
    assert again["chain"] == [f"{line_of(program, '# in the fork')} <module>"]


@pytest.mark.unit
def test_a_gpu_that_was_initialised_is_marked_once(tmp_path, env):
    """torch's shape, and a GPU that can be had: the watch ends when it is initialised, and is back after a fork."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("")
    (tmp_path / "torch" / "cuda.py").write_text(
        textwrap.dedent(
            """
            import os
            _owner = None
            def is_initialized():
                return _owner == os.getpid()
            def _lazy_init():
                global _owner
                if is_initialized():
                    return
                if _owner:
                    raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")
                _owner = os.getpid()
            """
        )
    )
    program = script(
        tmp_path,
        """
        import os, sys, torch.cuda
        stock = torch.cuda._lazy_init.__code__
        torch.cuda._lazy_init()
        print(stock is torch.cuda._lazy_init.__code__, torch.cuda._lazy_init.__code__.co_filename)
        torch.cuda._lazy_init()
        if os.fork() == 0:
            try:
                torch.cuda._lazy_init()
            except RuntimeError:
                os._exit(0)
            os._exit(1)
        assert os.wait()[1] == 0
        """,
    )
    report, done = traced(tmp_path, env, [sys.executable, program])
    main, fork = report["processes"]
    assert done.stdout.split()[1] == str(tmp_path / "torch" / "cuda.py") and report["status"] == 0
    assert [g["outcome"] for g in main["gpu"]] == ["initialised"]
    assert fork["forked_with_gpu"]
    assert [g["outcome"] for g in fork["gpu"]] == ["RuntimeError: Cannot re-initialize CUDA in forked subprocess"]


# The page

needs_browser = pytest.mark.skipif(browser.program() is None, reason="there is no Chromium")


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """The page of ten thousand real imports in three processes, with a hazard among them."""
    folder = tmp_path_factory.mktemp("many")
    (folder / "aiter").mkdir()
    (folder / "aiter" / "__init__.py").write_text("import json\nimport time\ntime.sleep(0.05)\n")
    package = folder / "many"
    package.mkdir()
    (package / "__init__.py").write_text("")
    for number in range(3400):
        inner = f"import many.m{number + 1}\n" if number % 40 < 39 else ""
        (package / f"m{number}.py").write_text(inner if number != 1700 else "import aiter\n" + inner)
    program = folder / "program.py"
    program.write_text(
        "import importlib, os, sys\nchild = os.fork()\ngrandchild = os.fork()\n"
        "for n in range(0, 3400, 40): importlib.import_module(f'many.m{n}')\n"
        "if child: os.waitpid(child, 0)\nif grandchild: os.waitpid(grandchild, 0)\n"
    )
    page = folder / "page.html"
    command = [*TRACE, "--html", str(page), "--", sys.executable, "-B", str(program)]
    base = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(command, env=base, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return page


@needs_browser
def test_the_page_with_ten_thousand_imports(many, tmp_path):
    text = many.read_text()
    assert not re.search(
        r"""(?:src|href)\s*=|url\(|@import|https?://""", re.sub(r"<script id=.data.*?</script>", "", text)
    )
    with browser.page() as page:
        page.open(many)
        assert page.evaluate("data.lanes.reduce((n, lane) => n + lane.imports.length, 0)") > 10_000
        lanes = page.evaluate("data.lanes.map(lane => [lane.kind, lane.depth])")
        assert lanes[0] == ["start", 0] and sorted(lanes[1:]) == [["fork", 1], ["fork", 1], ["fork", 2]]
        # Fewer bars than imports where several share a pixel, and no more than the screen can hold when zoomed in.
        assert 0 < page.evaluate("window.drawn.bars") < 10_000
        draws = []
        for _ in range(12):
            page.evaluate("zoom(0.7)")
            page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
            draws.append(page.evaluate("window.drawn.milliseconds"))
        print(f"a frame takes {sorted(draws)[6]:.1f} ms, at most {max(draws):.1f} ms")
        assert sorted(draws)[6] < 100  # five times a smooth frame, for a busy machine; measured: a few ms

        # A click on a bar tells the chain of files; the mark of the hazard tells its own.
        page.evaluate("show(0, last)")
        where = page.evaluate(
            "(() => { const lane = data.lanes[0], i = lane.imports.findIndex(o => text(o[NAME]) === 'many.m1719');"
            " const one = lane.imports[i]; show(one[BEGIN] - 100, one[BEGIN] + one[TOOK] + 100);"
            " $('view').scrollTop = 0; top_ = 0;"
            " const box = canvas.getBoundingClientRect();"
            " return [box.left + (x(one[BEGIN]) + x(one[BEGIN] + one[TOOK])) / 2,"
            "         box.top + lane.y + HEAD + (one[DEPTH] + 0.5) * lane.row] })()"
        )
        page.click(*where)
        chosen = page.evaluate("$('chosen').innerText")
        assert "many.m1719" in chosen and "m1718.py:1 imports many.m1719" in chosen
        chain = re.findall(r"imports (\S+)", chosen)
        assert chain[-1] == "many.m1719" and chain[0] in ("many.m1680", "many") and "many.m1700" in chain
        page.evaluate("document.querySelector('#events button.hazard').click()")
        chosen = page.evaluate("$('chosen').innerText")
        assert "imports aiter, first of all" in chosen and "m1700.py:1 <module>" in chosen
        page.screenshot(tmp_path / "page.png")
        assert (tmp_path / "page.png").stat().st_size > 20_000
        assert page.errors == []
        assert [url for url in page.requests if not url.startswith("file://")] == []


@needs_browser
def test_a_module_with_a_hostile_name(tmp_path, env):
    page_file = tmp_path / "page.html"
    name = "</script><script>window.pwned=1</script>"
    code = f"import importlib\ntry: importlib.import_module('{name}')\nexcept ImportError: pass"
    traced(tmp_path, env, [sys.executable, "-c", code], "--html", str(page_file))
    with browser.page() as page:
        page.open(page_file)
        assert page.evaluate("window.pwned") is None
        assert page.evaluate("data.strings.some(name => name.startsWith('</script>'))")


# A real service


def test_the_example_of_the_operators_shows_the_difference(tmp_path):
    """Run as it stands in docs/operators.md, on the stand-in node, without the overlay and with it."""
    page = (Path(__file__).parent.parent / "docs" / "operators.md").read_text()
    example = re.search(r"    \$ cat config.py\n((?:(?:    .*)?\n)+?)    \$ ", page)[1]
    example, changed = re.subn(r'model="[^"]+"', 'model="models/dense", skip_tokenizer_init=True', example)
    assert changed == 1
    command = [sys.executable, script(tmp_path, example, "config.py")]
    built = node.build(tmp_path / "node", version="0.23.0", vllm=tree("0.23.0"))
    base = {k: v for k, v in os.environ.items() if not k.startswith(("ROCM_FIXES", "VLLM_"))}
    make = "from pathlib import Path; from rocm_standin import models; models.make(Path('models'))"
    subprocess.run([sys.executable, "-c", make], cwd=tmp_path, env=built.environment(base), check=True)
    seen = {}
    for state in ("off", "on"):
        report, _ = traced(tmp_path, built.environment(base, ROCM_FIXES=state), command)
        seen[state] = {hazard["name"] for process in report["processes"] for hazard in process["hazards"]}
        assert report["status"] == 0
    assert "aiter" in seen["off"] and not seen["on"]


def test_a_real_vllm_serve_and_ps(tmp_path, env):
    """An unchanged `vllm serve` on the CPU under the tracer: three processes, all mended, and ps joins them."""
    model = tmp_path / "model"
    model.mkdir()
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "vocab_size": 256}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 256}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", **sizes, **heads}
    (model / "config.json").write_text(json.dumps(config))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = (
        f"--skip-tokenizer-init --load-format dummy --max-model-len 128 --enforce-eager --gpu-memory-utilization 0.1 "
        f"--dtype bfloat16 --host 127.0.0.1 --port {port}"
    )
    vllm = os.path.join(os.path.dirname(sys.executable), "vllm")
    runtime = tmp_path / "run"
    runtime.mkdir(mode=0o700)
    env |= {"XDG_RUNTIME_DIR": str(runtime), "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    env |= {"VLLM_NO_USAGE_STATS": "1"}
    report, html, log = tmp_path / "report.json", tmp_path / "page.html", tmp_path / "log"
    command = [*TRACE, "--json", "--output", str(report), "--html", str(html), "--", vllm, "serve", str(model)]
    with log.open("w") as output:
        process = subprocess.Popen([*command, *options.split()], env=env, stdout=output, stderr=subprocess.STDOUT)
    try:
        _wait_for(f"http://127.0.0.1:{port}/health", process, log)
        shown = subprocess.run(
            [sys.executable, "-m", "vllm_rocm_fixes", "ps", "--json"],
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        services = json.loads(shown.stdout)["services"]
        text = subprocess.run(
            [sys.executable, "-m", "vllm_rocm_fixes", "ps"], env=env, capture_output=True, text=True, check=False
        ).stdout
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    # ps: the three processes of this service, one below the other, with the same patches.
    [ours] = [s for s in services if any(p["parent"] == process.pid for p in s["processes"])]
    roles = {p["role"]: p for p in ours["processes"]}
    assert set(roles) == {"API server", "EngineCore", "Worker"}, text
    assert roles["EngineCore"]["parent"] == roles["API server"]["pid"]
    assert roles["Worker"]["parent"] == roles["EngineCore"]["pid"]
    assert all(p["marks"] == [] and not p["forked"] and p["patches"] for p in roles.values())
    assert roles["Worker"]["patches"]["sampler"]["state"] == "applied"
    # trace: the same three, thousands of imports, and neither hazards nor a GPU.
    told = json.loads(report.read_text())
    by_pid = {p["pid"]: p for p in told["processes"]}
    for role in roles.values():
        traced_one = by_pid[role["pid"]]
        assert traced_one["imports"] > 3000 and traced_one["hazards"] == [] and traced_one["gpu"] == []
    assert by_pid[roles["Worker"]["pid"]]["name"].startswith("VLLM::Worker")
    print(
        f"tracer: {told['overhead']['seconds']:.2f} s, {100 * told['overhead']['share']:.2f} % of the processes' time"
    )
    assert told["overhead"]["share"] < 0.05
    if browser.program():
        with browser.page() as page:
            page.open(html)
            assert page.evaluate("data.lanes.reduce((n, lane) => n + lane.imports.length, 0)") > 10_000
            assert page.evaluate("window.drawn.bars") > 500 and page.errors == []
            page.screenshot(tmp_path / "serve.png")


def _wait_for(url, process, log):
    end = time.monotonic() + 600
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(log.read_text()[-3000:])
