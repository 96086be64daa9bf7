//! The effective configuration: file, environment and flags.
