"""config.pbtxt of the models in triton_backends/generating: names, types and shapes of the real."""

from pathlib import Path

__all__ = ["STAND_INS", "config_of"]

STAND_INS = ("vllm", "ensemble", "bls", "engine")

_TEXT = {
    "text_input": "STRING",
    "max_tokens": "INT32",
    "stop_words": "STRING -1",
    "end_id": "INT32",
    "top_k": "INT32",
    "top_p": "FP32",
    "temperature": "FP32",
    "seed": "UINT64",
    "stream": "BOOL",
    "exclude_input_in_output": "BOOL",
    "return_num_input_tokens": "BOOL",
    "return_num_output_tokens": "BOOL",
}
_COUNTED = {"text_output": "STRING -1", "num_input_tokens": "INT32", "num_output_tokens": "INT32"}
INPUTS = {
    "vllm": {
        "text_input": "STRING",
        "stream": "BOOL",
        "sampling_parameters": "STRING",
        "exclude_input_in_output": "BOOL",
        "return_finish_reason": "BOOL",
        "return_num_input_tokens": "BOOL",
        "return_num_output_tokens": "BOOL",
    },
    "ensemble": _TEXT,
    "bls": _TEXT,
    "engine": {
        "input_ids": "INT32 -1",
        "input_lengths": "INT32",
        "request_output_len": "INT32",
        "end_id": "INT32",
        "pad_id": "INT32",
        "runtime_top_k": "INT32",
        "runtime_top_p": "FP32",
        "temperature": "FP32",
        "seed": "UINT64",
        "streaming": "BOOL",
        "exclude_input_in_output": "BOOL",
    },
}
OUTPUTS = {
    "vllm": {
        "text_output": "STRING -1",
        "finish_reason": "STRING -1",
        "num_input_tokens": "UINT32",
        "num_output_tokens": "UINT32 -1",
    },
    "ensemble": _COUNTED,
    "bls": _COUNTED,
    "engine": {"output_ids": "INT32 -1, -1", "sequence_length": "INT32 -1"},
}


def config_of(interface: str, export: Path, live: Path) -> str:
    """config.pbtxt of a stand-in, with the shapes of the model that it stands for."""

    def tensor(name: str, told: str, optional: bool) -> str:
        datatype, _, dims = told.partition(" ")
        end = " optional: true" if optional else ""
        return f'{{ name: "{name}" data_type: TYPE_{datatype} dims: [ {dims or 1} ]{end} }}'

    inputs = [tensor(name, told, True) for name, told in INPUTS[interface].items()]
    outputs = [tensor(name, told, False) for name, told in OUTPUTS[interface].items()]
    parameters = {"interface": interface, "export": str(export), "live": str(live)}
    if interface == "bls":
        parameters["accumulate_tokens"] = "true"
    return "\n".join(
        [
            f'name: "{interface}"',
            'backend: "python"',
            f"max_batch_size: {0 if interface == 'vllm' else 8}",
            "model_transaction_policy { decoupled: true }",
            f"input [ {', '.join(inputs)} ]",
            f"output [ {', '.join(outputs)} ]",
            *(
                f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'
                for key, value in parameters.items()
            ),
        ]
    )
