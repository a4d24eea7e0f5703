# Triton, with what the entries of triton_models/ on Octet's embedded engine import. Its image has
# Python 3.12 and pip for the Python backend, whose stub wants numpy 1. 26.06 is Triton 2.70 on CUDA
# 13. `make integration` tests 2.51, the only one in a wheel; that one's image (24.10) has Python
# 3.10, for which there is no Octet.
FROM nvcr.io/nvidia/tritonserver:26.06-py3
WORKDIR /source
COPY pyproject.toml constraints.txt README.md LICENSE NOTICE ./
COPY octet octet
COPY calibrate calibrate
COPY export export
COPY serve serve
COPY verify verify
COPY octet_cli octet_cli
RUN sed -i '/^numpy==/d' constraints.txt \
  && python3 -m pip install --no-cache-dir --break-system-packages -c constraints.txt \
    '.[serve]' 'numpy<2'
ENV ORT_DISABLE_TELEMETRY=1
RUN useradd --system --uid 10001 --user-group --no-create-home octet
WORKDIR /opt/tritonserver
USER 10001:10001
EXPOSE 8000 8001 8002
