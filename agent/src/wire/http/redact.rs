//! Blanks what an event carries, for recordings.
