"""The commands of `octet`, by stage; each imports its stage when it is called."""
