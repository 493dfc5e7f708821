"""The reference inference server: a Hugging Face model that generates while weights arrive."""
