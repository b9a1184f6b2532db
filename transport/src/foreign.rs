//! What an implementation of [`Source`](crate::source::Source) for another program's layout needs: tensors
//! come as absolute bytes, and go through the same journal as ours
//! ([`Replica::advance_foreign`](crate::Replica::advance_foreign)).

pub use crate::checkpoint::STATE_DIR;
pub use crate::manifest::Tables;
pub use crate::publish::check_finite;
pub use crate::replica::{Foreign, OnDisk, Rewrite, Rewriter, SLICE_BYTES, position, refuse_foreign};
pub use crate::snapshot::{check_table, is_plain_name};
