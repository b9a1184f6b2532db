//! In place of `device` in builds without the feature `cuda`: no tensor lies on a device.

use driftless_delta::Digest;

use super::encode::{BaseView, Coder, Done, Payloads};
use super::shard::Shard;
use crate::manifest::Base;

#[derive(Debug, Default)]
pub(super) struct Devices {
    pub(super) used: DeviceUse,
}

#[derive(Debug, Default)]
pub(super) struct DeviceUse(());

pub(super) enum DeviceJob<'a> {
    #[expect(dead_code, reason = "there is none")]
    None(&'a std::convert::Infallible),
}

impl DeviceJob<'_> {
    pub(super) fn encode(&self, _: &Coder) -> Result<Payloads, Option<String>> {
        Err(None)
    }
}

impl DeviceUse {
    pub(super) fn redone(&mut self, _: &DeviceJob<'_>, _: Option<String>) {}
}

impl Devices {
    pub(super) fn job(
        &self,
        _: &dyn Shard,
        _: usize,
        _: Option<&BaseView<'_>>,
        _: &Coder,
        _: &mut DeviceUse,
    ) -> Option<DeviceJob<'static>> {
        None
    }

    pub(super) fn digest(&self, _: &dyn Shard, _: usize) -> Option<Digest> {
        None
    }

    pub(super) fn are_one(&self, _: &dyn Shard, _: usize, _: usize) -> bool {
        false
    }

    pub(super) fn keep(&mut self, _: &dyn Shard, _: &[Done], _: Base) {}
}
