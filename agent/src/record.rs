//! Recordings of what the tap saw: written by `omnitap record`, read by `omnitap replay`.
