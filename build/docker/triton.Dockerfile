# A Triton server for what `llmserve export triton` writes: docker build -f build/docker/triton.Dockerfile -t llmserve-triton .
# Any release whose python3 is 3.11 or newer. numpy 1, as stubs of older releases die with numpy 2.
ARG TRITON_IMAGE=nvcr.io/nvidia/tritonserver:25.05-py3

FROM ${TRITON_IMAGE} AS build
RUN apt-get update && apt-get install --no-install-recommends -y g++ python3-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY CMakeLists.txt pyproject.toml README.md LICENSE ./
COPY llmserve llmserve
COPY pipelines pipelines
COPY pipelines-embeddings pipelines-embeddings
RUN python3 -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${TRITON_IMAGE}
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    python3 -m pip install --no-cache-dir /wheels/llmserve-*.whl 'numpy<2'
EXPOSE 8000 8001 8002
CMD ["tritonserver", "--model-repository=/models"]
