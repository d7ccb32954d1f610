# llmserve on NVIDIA's TensorRT-LLM: docker build -f build/docker/tensorrt_llm.Dockerfile -t llmserve-tensorrt-llm .
# Its Python, torch, numpy and TensorRT stay as they are: what is installed there is a constraint for pip.
ARG TENSORRT_LLM_IMAGE=nvcr.io/nvidia/tensorrt-llm/release:1.2.1

FROM ${TENSORRT_LLM_IMAGE} AS build
RUN apt-get update && apt-get install --no-install-recommends -y g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY CMakeLists.txt pyproject.toml README.md LICENSE ./
COPY llmserve llmserve
COPY pipelines pipelines
COPY pipelines-embeddings pipelines-embeddings
RUN python3 -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${TENSORRT_LLM_IMAGE}
RUN python3 -m pip list --format=freeze | grep -iE '^(numpy|torch|tensorrt[^=]*|protobuf|transformers)==' > /constraints.txt
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    python3 -m pip install --no-cache-dir --constraint /constraints.txt /wheels/llmserve-*.whl
WORKDIR /workspace
EXPOSE 8000 8001 8002
HEALTHCHECK --start-period=600s CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/v2/health/ready', timeout=5)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["llmserve"]
CMD ["serve", "/engine"]
