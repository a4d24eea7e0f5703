"""Reads and writes safetensors files, JSON documents and checksums."""
