# Triton, with what the entries of triton_models/ on Octet's embedded engine import. Its image has
# Python 3.12 and pip for the Python backend, whose stub wants numpy 1.
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
WORKDIR /opt/tritonserver
EXPOSE 8000 8001 8002
