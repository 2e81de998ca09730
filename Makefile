# README's two commands are `make demo` and `make test`. Each sets up what it needs first.

PYTHON := .venv/bin/python
# Where it is set, each process compiles podgate and its tests again, in half of its CPU time.
unexport PYTHONDONTWRITEBYTECODE
# What the demo and tests have compiled of the same C sources, they need not compile again.
COMPILED := PODGATE_COMPILE_CACHE=$(CURDIR)/.venv/compiled
# A test that fails runs again, alone, at the end: CONTRIBUTING.md, Flaky tests.
PYTEST := $(COMPILED) $(PYTHON) -m pytest --twice
UNIT_WORKERS := $(shell expr $$(nproc) + 1)
# Suites with a target of their own: the image, the proxies, which are off by default, the status page
# in a browser, and a real cluster, which needs its programs.
APART := --ignore tests/image --ignore tests/proxy --ignore tests/cluster --ignore tests/page \
	--ignore tests/networks --ignore tests/fleet --ignore tests/nri \
	--ignore tests/kernel/devices
# Time limits of suites that take more than minutes for a test.
LONG := --timeout 3600 -o faulthandler_timeout=7200
C_FILES := $(shell find bpf deploy -name '*.[ch]')
CNI := .venv/bin/podgate-cni
PROTO_FILES := $(shell find agent tests -name '*.proto')

.PHONY: client cnp go-stubs demo durations test lint types test-unit test-kernel mutants test-image test-page test-chart test-cluster test-proxy test-container test-continuity test-strict test-faults test-bypass-strict test-attacks test-kernels test-bare flakes bench bench-recorded fuzz format docs pictures proto image push plugin setup clean test-meshes test-crowd test-networks test-fleet test-nri

demo: .venv/.run
	@$(COMPILED) $(PYTHON) -m agent demo $(ARGS)

# Kernel tests, which wait for the kernel an eighth of their time, beside all others one after the other.
# These have no more workers than processors here: what is alone with the kernel tests is to run well.
# They also come second to kernel tests, which would leave processors idle if they ended last.
test: setup
	@$(MAKE) --no-print-directory --jobs 2 --output-sync --keep-going UNIT_WORKERS=$(shell nproc) \
		UNIT_NICE="nice -n 3" test-kernel lint types test-unit

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/lint-imports
	.venv/bin/clang-format --dry-run --Werror $(C_FILES)
	$(PYTHON) -m tests.voice

# A second mypy waits for the cache of the first, which has done its work.
types: setup
	flock .venv .venv/bin/mypy

test-unit: setup
	$(UNIT_NICE) env $(PYTEST) -m "not kernel" -n $(UNIT_WORKERS)

# Needs root and a kernel with BPF; a missing feature is an error, never a skip. Each test that changes
# its node has one for itself (tests/nodes). Three workers for each processor, since tests wait for the
# kernel. Beside other targets (`make test`) its progress is printed at once, as make does for a line with +,
# which runs in `make -n`, too.
AT_ONCE = $(if $(findstring n,$(firstword -$(MAKEFLAGS))),,+)
test-kernel: setup
	$(AT_ONCE)$(PYTEST) -m kernel -n $(shell expr $$(nproc) \* 3) $(APART)

# What the balance of workers knows: tests/nodes/durations.json, from a run of all tests.
durations: setup
	$(PYTEST) -m "not kernel" -n $(UNIT_WORKERS) --record-durations
	$(PYTEST) -m kernel -n $(shell expr $$(nproc) \* 3) --record-durations $(APART)

# How often the tests fail that the last runs have listed as flaky, or TESTS="tests/FILE.py::TEST ...",
# each 50 times (TIMES=) beside a load on all processors, for 20 minutes a test at most (MINUTES=).
flakes: setup
	@$(PYTHON) -m tests.flakes $(if $(TIMES),--times $(TIMES)) $(if $(MINUTES),--minutes $(MINUTES)) $(TESTS)

# Changes of the code that no test detects: in the modules that differ from main, in those of
# `make mutants FILES="agent/pods bpf/rules.py"`, in a sample of all by `make mutants SAMPLE=200 SEED=1`,
# or the changes of tests/mutants/handmade.py by `make mutants HANDMADE=1`. What survives the unit tests of a
# sample is tried with kernel tests, too, unless KERNEL=0; of other mutants with KERNEL=1. The first time this
# records what kernel tests run, which takes as long as all of them. LIST=FILE gets a line of JSON for each
# survivor.
mutants: setup
	@$(PYTHON) -m tests.mutants $(if $(SAMPLE),--sample $(SAMPLE)) $(if $(SEED),--seed $(SEED)) \
		$(if $(HANDMADE),--handmade) $(if $(LIST),--list $(LIST)) $(if $(KERNEL),--$(if $(filter 0,$(KERNEL)),no-)kernel) $(FILES)

# All proxies, three minutes.
test-proxy: setup
	$(PYTEST) tests/proxy -m "not kernel" -n auto
	$(PYTEST) tests/proxy -m kernel -n auto

# The status page of a real agent in Chromium, which it installs; a minute.
test-page: setup .venv/.page
	$(PYTEST) tests/page

# The DaemonSet's pod on a containerd of the tests; a minute, most of it to build the image. With
# ARCH=arm64 that architecture's image, of its packages: QEMU emulates the build, and what is in it (Linux 6.7 and newer).
test-image: setup
	PODGATE_TEST_ARCHITECTURE=$(ARCH) $(PYTEST) $(if $(ARCH),-m "not kernel" tests/image/test_contents.py,tests/image)

# The chart by Helm itself: `make test-chart HELM=PATH`. `make test` renders it by our own renderer.
test-chart: setup
	PODGATE_TEST_HELM=$(or $(HELM),helm) $(PYTEST) tests/chart/with_helm.py

# podgate in a cluster of one node, which starts in namespaces of its own from the programs in BIN:
# kube-apiserver, kube-controller-manager, kube-scheduler, kubelet, and etcd 3.5 or newer (Debian's if
# there is none); with the programs of test-nri there, its node has that runtime. Some tests with `make test-cluster BIN=DIR FILES="tests/cluster/test_deployment.py"`.
# 75 minutes, ten of them a soak: PODGATE_TEST_SOAK_SECONDS and PODGATE_TEST_SEED change that,
# PODGATE_TEST_KILLS=20 kills more relays, PODGATE_TEST_IMAGE=FILE tests an image that exists.
# HELM=PATH installs podgate by the chart, instead of deploy/manifests, which are made of it.
# Without BIN: what needs only an API server, in the cluster of KUBECONFIG.
test-cluster: setup
	PODGATE_TEST_BIN=$(BIN) PODGATE_TEST_HELM=$(HELM) $(PYTEST) $(LONG) $(or $(FILES),tests/cluster) $(if $(BIN),,-m 'not kernel')

# The cases of ClusterNetworkPolicy and the node (tests/cnp) in the cluster of KUBECONFIG, whatever implements the policies there: a minute. CRD=FILE
# is the resource's definition, where the cluster has none; `make cnp ARGS=--help` lists the rest.
cnp: setup
	@$(PYTHON) -m tests.cnp $(if $(CRD),--crd $(CRD)) $(ARGS)

# podgate beside Istio (sidecar and ambient), Linkerd and Consul's rules, by their own programs in
# MESHES, which tests/meshes/programs.py names; some by `ARGS="-k consul"`. A minute for each mesh, into
# docs/internals/mesh-runs.md.
test-meshes: setup
	@test -n "$(MESHES)" || { echo "name the folder of programs: make test-meshes MESHES=DIR" >&2; exit 2; }
	PODGATE_TEST_MESHES=$(MESHES) $(PYTEST) $(LONG) tests/meshes -n $(shell nproc) $(ARGS)

# podgate beside a real network plugin, in a cluster of one node as test-cluster has it: NET is
# calico-iptables, calico-nftables, calico-ebpf, aws or kube-router, and NETWORKS a directory whose
# subdirectory calico, aws or kube-router has the programs, built from their sources (calico.py, aws.py
# and kube_router.py of tests/networks list them). Twenty minutes for each; the results go to
# tests/networks/recorded and docs/internals/networks.md.
test-networks: setup
	PODGATE_TEST_BIN=$(BIN) PODGATE_TEST_NETWORK=$(NET) PODGATE_TEST_NETWORKS=$(NETWORKS) \
		$(PYTEST) $(LONG) $(or $(FILES),tests/networks)

# podgate on several nodes (NODES=, two), each in namespaces of its own. NET is flannel-vxlan or
# flannel-host-gw, with NETWORKS a directory whose subdirectory flannel has flannel's programs
# (tests/fleet/flannel.py lists them), or routes, which are static. PROXY is kube-proxy's mode
# (iptables or nftables, with kube-proxy in BIN), or rules, which stand in for it. Fifteen minutes; the
# results go where those of test-networks go. An hour's soak on three nodes, whose seed it prints:
# NODES=3 SECONDS=3600 FILES=tests/fleet/test_soak.py, SEED=17 for the same order.
test-fleet: setup
	PODGATE_TEST_BIN=$(BIN) PODGATE_TEST_NETWORK=$(NET) PODGATE_TEST_NETWORKS=$(NETWORKS) \
		PODGATE_TEST_PROXY=$(PROXY) PODGATE_TEST_NODES=$(NODES) \
		PODGATE_TEST_SOAK_SECONDS=$(SECONDS) PODGATE_TEST_SEED=$(SEED) \
		$(PYTEST) $(LONG) $(or $(FILES),tests/fleet)

# podgate as an NRI plugin of real runtimes, those of which BIN has all programs: containerd 2.x (containerd,
# containerd-shim-runc-v2, ctr) and CRI-O (crio, pinns; conmon and skopeo are Debian's). Two minutes for
# each. The same programs beside those of test-cluster make its cluster use them; containerd's are used
# by FILES="tests/runtime tests/node", too.
test-nri: setup
	@test -n "$(BIN)" || { echo "name the folder of programs: make test-nri BIN=DIR" >&2; exit 2; }
	PODGATE_TEST_BIN=$(BIN) $(PYTEST) $(LONG) $(or $(FILES),tests/nri)

# Gates and connections over 20 killed agents, 5 upgrades and 200 pods, by tcx and by clsact; and ten
# minutes without an agent, in which the kubelet restarts five times.
test-continuity: setup
	PODGATE_TEST_CONTINUITY=1 $(PYTEST) $(LONG) tests/kernel/test_continuity.py \
		tests/kernel/test_kubelet_without_agent.py

# 200 pods whose qdiscs another program deletes at random instants, twenty times with other ones
# (PODS=, TIMES=); ten minutes.
test-crowd: setup
	PODGATE_TEST_CROWD=$(or $(PODS),200) PODGATE_TEST_TIMES=$(or $(TIMES),20) \
		$(PYTEST) -s $(LONG) tests/kernel/test_deleted_gates.py

# The relay killed, hung for a minute and upgraded ten times under 200 probes a second.
test-strict: setup
	PODGATE_TEST_STRICT=1 $(PYTEST) $(LONG) tests/kernel/test_strict_faults.py

# The suites of attacks in strict, where `make test-kernel` has them in enforce. They take this mode
# from tests/kernel/enforcing.py; what only enforce has is left out (mark `enforce_only`).
BYPASSES := $(wildcard tests/kernel/test_bypass*.py) tests/kernel/test_many_addresses.py \
	tests/kernel/test_router_advertisements.py
test-bypass-strict: setup
	PODGATE_TEST_MODE=strict $(PYTEST) $(BYPASSES) -n $(shell expr $$(nproc) + 1)

# Each attack of tests/attacks in each topology and each mode, of which `make test` has each topology once;
# two minutes.
test-attacks: setup
	PODGATE_TEST_ATTACKS=all $(PYTEST) tests/kernel/test_attacks.py -n $(shell expr $$(nproc) + 1)

# Faults that are injected for real into an agent, one for each seed (tests/faults): a thousand by
# default, `make test-faults SEEDS=200`, `SEEDS=201-400`, or one again: `make test-faults SEED=17`.
# About two seconds for each on an idle processor.
test-faults: setup
	PODGATE_TEST_SEED=$(SEED) PODGATE_TEST_SEEDS=$(or $(SEEDS),1000) \
		$(PYTHON) -m pytest tests/faults/test_faults.py $(LONG) -rP -n $(if $(SEED),0,$(shell nproc))

# A hundred pods in a container runtime and in a cluster, where the kernel tests have eight.
test-pods: setup
	PODGATE_TEST_PODS=100 $(PYTEST) $(LONG) -s tests/runtime/test_crowd.py tests/node/test_crowd.py

# Kernel tests inside the container that the DaemonSet makes: the image's Python and libraries, its
# rights and mounts. `make test-container FILES="tests/kernel/test_agent.py"` for some.
INSIDE := $(addprefix tests/kernel/test_,$(addsuffix .py,agent attach attacks default_deny hooks kubelet \
	listener_watch loader policies probing relay_pair strict upgrade))
test-container: setup
	@$(PYTHON) -m tests.image.inside $(or $(FILES),$(INSIDE))

# All kernel tests on Debian's kernels in QEMU, into docs/internals/kernel-runs.md, with tests/kernel/devices, for which
# guests get modules and packages; `make test-kernels KERNEL=6.1` takes one, SYSTEMD=1 boots systemd,
# ARCH=arm64 is a machine of that architecture.
# Hours for each, since the machines are emulated in software: MINUTES=60 ends a run before, and RESUME=1
# continues it, on any machine (tests/kernels/recorded). QEMU=PATH takes another QEMU than the
# distribution's. Fewer tests with
# `make test-kernels KERNEL=6.1 FILES="tests/kernel/test_agent.py tests/kernel/test_strict.py"`.
test-kernels: setup
	@$(PYTHON) -m tests.kernels $(KERNEL) $(if $(FILES),--files $(FILES)) $(if $(RESUME),--resume) \
		$(if $(SYSTEMD),--systemd) $(if $(ARCH),--architecture $(ARCH)) $(if $(MINUTES),--minutes $(MINUTES)) $(if $(QEMU),--emulator $(QEMU))

# `make demo` and `make test` on a bare Debian 12 or 13, from a clean clone of HEAD; needs root and
# debootstrap. `make test-bare DEBIAN=12 ARGS="--times 10 --load"`, and `--help` for more.
test-bare:
	@PYTHONDONTWRITEBYTECODE=1 python3 -m tests.bare $(or $(DEBIAN),13) $(ARGS)

# All benchmarks, or `make bench BENCH=start`; figures are JSON lines on stdout. `make bench
# BENCH=cluster BIN=DIR` needs the programs of a cluster, as test-cluster does. RECORD=1 keeps the figures in tests/bench/recorded, of
# which `make docs` makes docs/internals/benchmarks.md; COMPARE=1 fails if a ratio is worse than all that were recorded.
bench: setup
	@PODGATE_TEST_BIN=$(BIN) $(PYTHON) -m tests.bench $(if $(RECORD),--record) $(if $(COMPARE),--compare) $(BENCH)

# Each bench that has a record, compared with it: a run each night (.github/workflows/nightly.yaml).
bench-recorded: setup
	@$(MAKE) --no-print-directory bench COMPARE=1 BENCH="$(notdir $(basename $(wildcard tests/bench/recorded/*.json)))"

# The property tests with new examples, which `make test` runs with the same ones each time: those of probes' parsers again and
# again; `make fuzz SECONDS=60` for less than ten minutes; then all once. Then a million made frames and calls (FRAMES=)
# for the programs of the gate, the hooks and the relay and their specifications, in some minutes: needs root. SEED= repeats a run.
fuzz: setup
	@$(PYTHON) -m tests.fuzz $(SECONDS)
	$(PYTHON) -m pytest -m hypothesis --hypothesis-profile new-examples -n $(UNIT_WORKERS) $(APART)
	PODGATE_TEST_FRAMES=$(or $(FRAMES),1000000) PODGATE_TEST_SEED=$(or $(SEED),new) \
		$(PYTHON) -m pytest -s $(LONG) $(foreach what,gate hook socket relay,tests/kernel/test_$(what)_model.py)

format: setup
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .
	.venv/bin/clang-format -i $(C_FILES)

# docs/reference/ and the definition of HostAccessPolicies from the code, deploy/manifests from the chart; a test fails if one is not current.
docs: setup
	$(PYTHON) -m agent.operate.cli.reference
	$(PYTHON) -m tests.attacks
	$(PYTHON) -m tests.model.page
	$(PYTHON) -m tests.docs.api_reference
	$(PYTHON) -m tests.chart
	$(PYTHON) -m tests.compatibility
	$(PYTHON) -m tests.bench.page

# The pictures of docs/, from real runs: what `make demo` shows in a terminal, the status page, and the
# dashboards by a Prometheus that scrapes an agent.
pictures: setup .venv/.page
	$(PYTHON) -m agent.operate.demo.recording docs/demo.svg
	$(PYTHON) -m tests.page.pictures docs
	$(PYTHON) -m tests.dashboards.pictures docs

# The messages of other programs' APIs, from our own excerpts of their definitions.
proto: setup
	$(PYTHON) -m grpc_tools.protoc -I. --python_out=. --pyi_out=. $(PROTO_FILES)

# The image as an OCI archive, of this machine's Debian and architecture, and its SBOM.
image: setup
	@mkdir -p dist
	$(PYTHON) deploy/rootfs.py --name localhost/podgate:$$($(PYTHON) -c 'import agent; print(agent.VERSION)') \
		--revision $$(git rev-parse HEAD) --sbom dist/podgate.spdx.json dist/podgate.tar

# The image into a registry, `make push REGISTRY=registry.example:5000`; prints its name and digest.
push: image
	@deploy/push.sh dist/podgate.tar "$(REGISTRY)"

# podgate-client: the clients of the node-local APIs, for other programs.
client: setup
	@mkdir -p dist
	cd deploy/client && $(abspath $(PYTHON)) -m hatchling build -t wheel -d $(abspath dist)

# The same messages for Go, in dist/go/src/podgate.io/api, and compiled; needs Debian's golang-go,
# protoc-gen-go, protoc-gen-go-grpc and golang-google-grpc-dev.
go-stubs: setup
	@deploy/client/go-stubs.sh $(abspath $(PYTHON)) $(abspath dist/go)

# `kubectl podgate`: one file, for a directory of the PATH.
plugin:
	python3 deploy/plugin.py dist/kubectl-podgate

setup: .venv/.complete $(CNI)

# The CNI plugin: a static program, which `podgate cni install` copies to the node's plugins.
$(CNI): .venv/.complete deploy/cni/build.sh $(wildcard deploy/cni/*.[ch]) bpf/src/abi.h bpf/abi.py
	@deploy/cni/build.sh $@

# What the agent and the demo need; tests need more.
.venv/.run: pyproject.toml deploy/constraints.txt deploy/setup.sh
	@deploy/setup.sh run

.venv/.complete: pyproject.toml deploy/constraints.txt deploy/setup.sh
	@deploy/setup.sh

.venv/.page: deploy/setup.sh
	@deploy/setup.sh page

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
