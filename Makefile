# Any target can be the first command in a fresh clone: each installs what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: chaos chaos-sweeps demo test lint generate results architecture docs bench bench-offline bench-prior-data bench-modes bench-learning bench-gpu test-package test-pages test-docs test-faults test-ray test-simulators test-thorough test-browser test-learning test-compiled setup clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("rl_training needs Python 3.11 or later: make PYTHON=python3.12 ...") if sys.version_info < (3, 11) else None'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing (once; a few minutes) ..."
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[mujoco,offline,docs,dev]"
	@touch $@

demo: $(READY)
	@$(BIN)/python examples/sac_pendulum_reference.py

lint: $(READY)
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/python tools/generate_api.py --check
	@$(BIN)/python tools/generate_docs.py --check
	@$(BIN)/python benchmarks/results_pages.py --check
	@$(BIN)/mypy
	@$(BIN)/lint-imports

# Writes export lists, managed classes, their stub and trainers from the algorithms' SPECs, and the
# tables of settings in docs/.
generate: $(READY)
	@$(BIN)/python tools/generate_api.py
	@$(BIN)/python tools/generate_docs.py

# Writes tables, pictures and the page of results from the JSON files of measurements. Takes a minute: it
# rehearses each result to find out whether the code still computes it.
results: $(READY)
	@$(BIN)/python benchmarks/results_pages.py --check-mathematics

# Writes the drawings of docs/architecture.md and the tables of CONTRIBUTING.md from imports and a trace.
architecture: $(READY)
	@$(BIN)/python tools/architecture.py --draw

# Builds the site in docs/_build/html. A broken link, an unknown name or any other warning is an error.
docs: $(READY)
	@$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet docs docs/_build/html
	@echo "open docs/_build/html/index.html"

# One thread per worker: two workers already use two cores.
test: lint
	@OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses 2

# Builds the package, installs it into an empty environment, and trains there.
test-package: $(READY)
	@$(BIN)/pytest -m package

# Runs the examples, and the commands and the code in the documentation, and builds its site.
test-docs: $(READY)
	@OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses 2 -m docs

# Kills and interrupts entire processes.
test-faults: $(READY)
	@OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses 2 -m faults

# Starts real Ray clusters in processes, and kills their workers and nodes.
test-ray: $(READY)
	@OMP_NUM_THREADS=1 $(BIN)/pytest -m ray

# Installs simulators of other packages, several gigabytes, and runs the adapters of tensor environments there.
test-simulators: $(READY)
	@$(BIN)/python benchmarks/simulators.py

# Kills workers, nodes and drivers of sweeps at random, with ten different seeds.
chaos-sweeps: $(READY)
	@RL_TRAINING_KILL_SEEDS=0,1,2,3,4,5,6,7,8,9 OMP_NUM_THREADS=1 $(BIN)/pytest -m "faults or ray" \
		tests/test_sweeps.py tests/test_sweeps_on_ray.py -k "kills or losses"

# Opens the report and the dashboard in Debian's or another Chromium; skipped where none is installed.
test-browser: $(READY)
	@OMP_NUM_THREADS=1 $(BIN)/pytest -m browser

# Resumes and learns with many combinations of algorithms and settings.
test-thorough: $(READY)
	@OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses 2 -m thorough

# Kills, damages and interrupts runs in every way that docs/reliability.md promises to survive: all
# campaigns at their full figures, in about half an hour on two cores.
chaos: $(READY)
	@$(BIN)/python -m tests.chaos --json benchmarks/results/reliability.json; code=$$?; \
		$(BIN)/python tools/generate_docs.py; exit $$code

test-learning: $(READY)
	@OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses 2 -m learning

test-compiled: $(READY)
	@$(BIN)/pytest -m compiled

# Run these on an idle machine. They run one after another and write benchmarks/results/NAME.json.
bench: $(READY)
	@$(BIN)/python benchmarks/cpu.py
	@$(BIN)/python benchmarks/environments.py
	@$(BIN)/python benchmarks/remote_environments.py
	@$(BIN)/python benchmarks/readers.py
	@$(BIN)/python benchmarks/loading.py
	@$(BIN)/python benchmarks/memory.py
	@$(BIN)/python benchmarks/frame_memory.py
	@$(BIN)/python benchmarks/saving.py
	@$(BIN)/python benchmarks/startup.py
	@$(BIN)/python benchmarks/compile_choice.py

# Compares returns, not speed: this package and d3rlpy on the same recorded steps.
bench-offline: $(READY)
	@$(BIN)/python benchmarks/offline_learning.py

# Measures how many environment steps prior data saves.
bench-prior-data: $(READY)
	@$(BIN)/python benchmarks/prior_data.py

# Compares returns of all execution modes.
bench-modes: $(READY)
	@$(BIN)/python benchmarks/modes.py

# Compares learning curves of config variants: a small example, and its table.
bench-learning: $(READY)
	@$(BIN)/python benchmarks/learning.py --config sac/pendulum --seeds 2 --steps 1500 \
		--eval-interval 500 --variant packaged --variant slow:algo_kwargs.learning_rate=3e-4 \
		--out .bench/learning
	@$(BIN)/python benchmarks/learning.py --summary --against packaged --out .bench/learning

bench-gpu: $(READY)
	@$(BIN)/python benchmarks/gpu.py

clean:
	rm -rf $(VENV) .bench docs/_build docs/reference/agents
