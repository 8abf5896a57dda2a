"""Commands of the tests: a script that plays no episode, but tells what it finds, or ends in many ways."""

import asyncio
import atexit
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback

import heavy

BEGAN = time.monotonic()


class Thing:
    pass


def say(reward, **parts):
    print(json.dumps({"reward": reward, **parts}), flush=True)


def tell(folder):
    own = sys.modules["__main__"]
    say(
        1,
        argv=sys.argv,
        orig_argv=getattr(sys, "orig_argv", [])[1:],
        path=sys.path,
        main=[__name__, __file__, own.Thing is Thing, pickle.loads(pickle.dumps(Thing)) is Thing],
        attributes=sorted(name for name in vars(own) if name not in ("__annotations__", "__cached__")),
        environment={name: value for name, value in os.environ.items() if name != "SLIPSTREAM_ROW"},
        input=sys.stdin.read(),
        streams=[(one.encoding, one.line_buffering, one.isatty()) for one in (sys.stdin, sys.stdout, sys.stderr)],
        descriptors=[name for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")],
        handlers=[str(signal.getsignal(number)) for number in range(1, 65) if number not in (9, 19, 32, 33)],
        blocked=sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        threads=[threading.active_count(), threading.current_thread() is threading.main_thread()],
        folder=os.getcwd(),
        finders=[getattr(one, "__name__", type(one).__name__) for one in sys.meta_path],
        own=[name for name in sys.modules if name.startswith("pipeline")],
        flags=repr(sys.flags),
        limits=os.getpgrp() == os.getsid(0) != os.getpid(),
        heavy=heavy.__name__,
    )


def drawn(folder):
    import random

    import numpy

    say(random.random(), numpy=numpy.random.random())


def file_of_a_module(folder):
    heavy.log.write("written\n")
    say(14)


def no_line(folder):
    print("bye")


def unflushed(folder):
    sys.stdout.write('{"reward": 2}')


def raised(folder):
    os.dup2(os.open(f"{folder}/raised", os.O_CREAT | os.O_WRONLY), 2)
    raise ValueError("boom")


def chained(folder):
    os.dup2(os.open(f"{folder}/chained", os.O_CREAT | os.O_WRONLY), 2)
    try:
        raise ValueError("first")
    except ValueError as error:
        raise RuntimeError("second") from error


def exit_number(folder):
    sys.exit(259)


def exit_text(folder):
    sys.exit("no game")


def exit_nothing(folder):
    say(3)
    sys.exit()


def exit_true(folder):
    raise SystemExit(True)


def interrupted(folder):
    raise KeyboardInterrupt


def left(folder):
    print("lost")
    os._exit(4)


def killed(folder):
    os.kill(os.getpid(), signal.SIGKILL)


def ended(folder):
    os.kill(os.getpid(), signal.SIGTERM)


def own_hook(folder):
    sys.excepthook = lambda kind, error, trace: print(kind.__name__, len(traceback.extract_tb(trace)), file=sys.stderr)
    raise ValueError("boom")


def bad_pipe(folder):
    reading, writing = os.pipe()
    os.close(reading)
    os.write(writing, b"x")


def at_exit(folder):
    atexit.register(say, 4)
    print("before")


def exit_raises(folder):
    atexit.register(sys.exit, 7)
    say(5)


def in_thread(folder):
    def later():
        time.sleep(0.2)
        say(6, main=sys.modules["__main__"].Thing is Thing)

    threading.Thread(target=later).start()
    print("before")


def daemon(folder):
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
    say(7)


def open_file(folder):
    global kept
    kept = open(f"{folder}/open_file", "w")  # noqa: SIM115
    kept.write("written")
    say(8)


def deleted(folder):
    class Last:
        def __del__(self):
            say(9)

    global kept
    kept = Last()


def loops(folder):
    async def main():
        process = await asyncio.create_subprocess_exec("echo", "10", stdout=subprocess.PIPE)
        printed, _ = await process.communicate()
        return int(printed) + await asyncio.to_thread(int, "1")

    say(asyncio.run(main()))


def child(folder):
    say(int(subprocess.run([sys.executable, "-c", "print(12)"], stdout=subprocess.PIPE, check=True).stdout))


def double(value):
    return 2 * value


def forked(folder):
    with multiprocessing.get_context("fork").Pool(1) as pool:
        say(pool.map(double, [6])[0])


def make(number):
    thing = Thing()
    thing.number = 2 * number
    return thing


def spawned(folder):
    os.environ["QUIET"] = "1"
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        say(pool.map(make, [6])[0].number)


def outlived(folder):
    subprocess.Popen(["sleep", "1000"])
    say(13)


def spends(folder):
    bytearray(8 << 30)


if __name__ == "__main__":
    with open(os.environ["SLIPSTREAM_ROW"]) as file:
        globals()[json.load(file)["ground_truth"]](sys.argv[1])
