# A server on a CPU or on NVIDIA GPUs; the build argument TORCH_INDEX decides, as it has the torch of
# the one or the other. Kernels are compiled for the host's processors at the first start, so that
# one image runs on every x86-64 machine; they are kept in the volume /var/cache/quadriga.
#
#   docker build -t quadriga .                                                              # CPU
#   docker build -t quadriga:cuda --build-arg TORCH_INDEX=https://pypi.org/simple .         # CUDA 13
#
#   docker run --init -p 127.0.0.1:8000:8000 -v quadriga-cache:/var/cache/quadriga \
#       -e QUADRIGA_API_KEY="$KEY" quadriga
#
# Its port is open to other machines as soon as Docker publishes it, so the server asks for a key;
# with the flag --insecure it needs none. On a GPU: `docker run --gpus all …` (with NVIDIA's container
# toolkit on the host), or compose.gpu.yaml.

FROM python:3.12-slim

RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

# On Linux the torch of PyPI brings gigabytes of CUDA libraries along; this index has CPU builds.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

# The layers of the dependencies are rebuilt only if these two files change.
WORKDIR /build
COPY pyproject.toml constraints.txt ./
RUN pip install --index-url "$TORCH_INDEX" "torch>=2.11,<2.14"
RUN python -c "import tomllib, torch; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
extras = ['serve', 'gpu'] if torch.version.cuda else ['serve']; \
print(*p['dependencies'], *sum(map(p['optional-dependencies'].get, extras), []), sep='\n')" \
        > requirements.txt \
    && pip install -c constraints.txt -r requirements.txt

COPY . .
RUN pip install --no-deps . && rm -rf build ./*.egg-info

RUN useradd --system --create-home --uid 10001 quadriga \
    && install --directory --owner quadriga --group quadriga \
        /var/cache/quadriga /var/lib/quadriga
USER 10001
WORKDIR /var/lib/quadriga
ENV QUADRIGA_CACHE=/var/cache/quadriga HF_HOME=/var/cache/quadriga/huggingface \
    TRITON_CACHE_DIR=/var/cache/quadriga/triton HUMMING_CACHE_DIR=/var/cache/quadriga/humming \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
VOLUME /var/cache/quadriga

EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s CMD \
    ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/readyz', timeout=4)"]
ENTRYPOINT ["quadriga", "serve", "--host", "0.0.0.0"]
