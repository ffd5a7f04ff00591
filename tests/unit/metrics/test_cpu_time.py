import subprocess
import sys

from megatron_bapo.metrics.cpu_time import __file__ as source

MEASURE = f"""
import runpy, subprocess, sys, time
family_cpu_s = runpy.run_path({source!r})["family_cpu_s"]
sibling = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
start = family_cpu_s()
subprocess.run([sys.executable, "-c", "import time\\nwhile time.process_time() < 0.5: pass"])
time.sleep(1.0)
print(family_cpu_s() - start)
sibling.kill()
"""


def test_a_childs_computation_counts_and_its_sleep_does_not():
    # In a family of its own: others of this process's parent may be busy.
    alone = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {MEASURE!r}])"
    done = subprocess.run([sys.executable, "-c", alone], capture_output=True, text=True, check=True)

    assert 0.45 < float(done.stdout) < 0.9
