"""What a backend answers to the golden records, and whether that is what its artifact should say.

`probe` asks, `plan` says what, `structure` reads what the engine says of itself; the judgement is
`octet.proof`'s.
"""
