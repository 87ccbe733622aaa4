"""LCSB on real quantised language models: torch, transformers, peft, bitsandbytes."""
