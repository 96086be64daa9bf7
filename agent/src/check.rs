//! What this machine lacks for the tap, each condition with its remedy.
