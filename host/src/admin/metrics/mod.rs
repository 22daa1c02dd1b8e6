//! The page of metrics, in OpenMetrics or in the text format of Prometheus.
//!
//! One file for each part that counts. `host/docs/metrics.md` lists all metrics.

mod broker;
mod cluster;
pub(super) mod disk;
mod exposition;
mod page;
mod policies;
pub(super) mod process;
pub(super) mod store;

use hyper::StatusCode;
use hyper::header::HeaderMap;
use statehouse_mqtt::Broker;

use super::Sources;
use super::answer::{Answer, with};
use super::cluster::ClusterFigures;
use crate::policies::manager::Listing;
use statehouse_access::audit::Audit;
use statehouse_files::watch::Reloads;
use statehouse_server::{logging, shadow::ShadowReport};

pub(super) use exposition::Format;
pub(super) use page::Page;

/// The page of a store.
pub(super) fn of_store(
    listing: &Listing,
    shadow: Option<&ShadowReport>,
    sources: &Sources,
) -> Page {
    let Sources { server, broker, .. } = sources;
    let limits = broker.as_ref().map(Broker::limits);
    let mut page = Page::default();
    let stats = server.stats();
    store::state(&mut page, &stats);
    store::duplicates(&mut page, &stats);
    store::times(&mut page, server.times());
    if let Some(counts) = server.trace_counts() {
        store::traces(&mut page, counts);
    }
    let log = sources.disk.as_ref().map(|disk| disk.log().figures());
    let unwritten = log.as_ref().map_or(0, |it| it.unwritten);
    let of_broker = broker.as_ref().map(Broker::stats);
    store::memory(&mut page, &stats, of_broker.as_ref(), unwritten);
    if let Some(log) = log {
        disk::log(&mut page, log);
    }
    let in_force = statehouse_config::named(&server.quota(), limits.as_deref());
    store::limits(&mut page, &in_force);
    store::refusals(&mut page, &sources.audit.counts());
    store::reloads(&mut page, sources.reloads.counts());
    if let Some(broker) = broker {
        broker::embedded(&mut page, &broker.stats());
        broker::refusals(&mut page, &broker.refusals());
    }
    if let Some(link) = server.link() {
        broker::foreign(&mut page, &link);
    }
    if let Some(leadership) = &sources.leadership {
        cluster::figures(&mut page, &leadership.figures());
    }
    policies::policies(&mut page, &listing.policies);
    if let Some(report) = shadow {
        policies::shadow(&mut page, report);
    }
    of_process(&mut page);
    page
}

/// The page of a host that does not lead its cluster.
pub(super) fn of_follower(
    figures: &ClusterFigures,
    audit: &Audit,
    reloads: Option<&Reloads>,
) -> Page {
    let mut page = Page::default();
    store::refusals(&mut page, &audit.counts());
    store::reloads(&mut page, reloads.into_iter().flat_map(Reloads::counts));
    cluster::figures(&mut page, figures);
    of_process(&mut page);
    page
}

fn of_process(page: &mut Page) {
    process::process(page);
    let help = "Log lines dropped because stderr was not read in time";
    page.count("log_dropped", help, logging::dropped());
}

/// An answer with a page, in the format that the request accepts.
pub(super) fn answer(page: Page, headers: &HeaderMap) -> Answer {
    let format = Format::accepted(headers);
    with(
        StatusCode::OK,
        format.media_type(),
        page.text(format).into_bytes(),
    )
}

#[cfg(test)]
pub(super) mod tests;
