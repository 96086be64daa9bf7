//! Log output: text or JSON, repeated warnings rate-limited.
