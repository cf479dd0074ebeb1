"""Our lines in a script that sets up logging in its own way."""

from __future__ import annotations

from tests.support.harness import Job

TRAINS = """
import logging, logging.config, os, signal, sys, time
from tests.support.scripts.ground import *
CONFIG = {
    "version": 1,
    "formatters": {"short": {"format": "%(name)s says %(levelname)s %(message)s"}},
    "handlers": {"out": {"class": "logging.StreamHandler", "formatter": "short"}},
    "root": {"level": "LEVEL", "handlers": ["out"]},
}
"""
EPOCH = """
for x, ids in migrator.batches(loader):
    train(x, ids)
    Path(os.environ["MIGRATOR_SIGNAL"] + ".other").write_text("x")
migrator.save_ckpt()
"""


def test_a_configuration_behind_the_import_does_not_silence_us(job: Job) -> None:
    """By default `dictConfig` disables all loggers that it does not name; ours go to the handlers it made."""
    life = job.write(
        TRAINS.replace("LEVEL", "WARNING")
        + "logging.config.dictConfig(CONFIG)\nbegin()\n"
        + "from migrator.save import attempt as saving\nfrom migrator.errors import StorageError\n"
        + "def fail(*args, **named): raise StorageError('no room')\nsaving.write_part = fail\n"
        + EPOCH
    ).run()

    assert life.wait() == 1, life.text
    assert "migrator says ERROR save_failed" in life.text


def test_a_configuration_behind_listening_does_not_either(job: Job) -> None:
    """Not even the whole way: the line that says how it left is there."""
    life = job.write(
        TRAINS
        + "begin()\nCONFIG['root']['level'] = 'INFO'\nlogging.config.dictConfig(CONFIG)\n"
        + EPOCH
        + "stop()\ntime.sleep(LONG_S)"
    ).run()

    assert life.wait() == 143, life.text
    assert life.events("leaving"), life.text


def test_a_level_that_was_set_for_us_is_kept(job: Job) -> None:
    """Who wants less says so."""
    life = job.write(TRAINS + "logging.getLogger('migrator').setLevel(logging.ERROR)\nbegin()\n" + EPOCH).run()

    assert life.wait() == 0, life.text
    assert "committed" not in life.text


def test_a_root_logger_at_debug_is_not_flooded(job: Job) -> None:
    """File events in the signal file's directory are not the script's; watchdog would log each of them."""
    config = "logging.basicConfig(level='DEBUG', format='%(name)s says %(levelname)s %(message)s')\n"
    life = job.write(TRAINS + config + "begin()\n" + EPOCH).run()

    assert life.wait() == 0, life.text
    assert "migrator says INFO committed" in life.text
    assert "watchdog" not in life.text


def test_a_level_that_was_set_for_watchdog_is_kept(job: Job) -> None:
    """A script may watch files itself, and want to see it."""
    life = job.write(
        TRAINS.replace("LEVEL", "DEBUG")
        + "CONFIG['loggers'] = {'watchdog': {'level': 'DEBUG'}}\nlogging.config.dictConfig(CONFIG)\nbegin()\n"
        + EPOCH
    ).run()

    assert life.wait() == 0, life.text
    assert "says DEBUG in-event" in life.text
