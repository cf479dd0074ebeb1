"""Several trainings in one process: a notice between them, and ranks that begin again together."""

from __future__ import annotations

from tests.support.harness import Job


def test_a_notice_is_not_lost_in_close(job: Job) -> None:
    """What was trained is saved, and the process leaves instead of beginning the next fold."""
    life = job.write("""
        from tests.support.scripts.ground import *
        begin()
        for x, ids in migrator.batches(loader):
            train(x, ids)
        os.kill(os.getpid(), signal.SIGTERM)
        migrator.close()
        print("goes on")
        """).run()

    assert life.wait() == 143, life.text
    assert life.events("leaving")[0]["step"] == "6"
    assert "goes on" not in life.text


def test_ranks_listen_again_together(job: Job) -> None:
    """Several ranks as one."""
    gang = job.write("""
        from datetime import timedelta
        from torch import distributed
        from tests.support.scripts.ground import *
        distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
        loader = DataLoader(data, batch_size=4)  # the same on both ranks
        torch.manual_seed(0)
        for fold in range(2):
            for name, value in {"model": model, "optimizer": optimizer, "state": state}.items():
                migrator.register(name, value)
            migrator.listening(every="off", job=f"fold-{fold}")
            for x, ids in migrator.batches(loader):
                train(x, ids)
            migrator.save_ckpt()
            migrator.close()
        distributed.barrier()
        distributed.destroy_process_group()
        """).gang(2)

    assert gang.wait() == [0, 0], gang.text
    assert job.ckpts() == ["000001-000000000006"] * 2, gang.text
    assert not gang.events("ranks_differ"), gang.text
