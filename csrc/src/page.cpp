#include "windrow/page.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "windrow/clock.h"

namespace windrow {
namespace {

std::size_t index(Writer writer) {
  return static_cast<std::size_t>(writer);
}

void require_counter(std::size_t counter) {
  if (counter >= SharedPage::kCounters) {
    throw std::out_of_range("counter " + std::to_string(counter) + " is none of the " +
                            std::to_string(SharedPage::kCounters));
  }
}

}  // namespace

void SharedPage::publish_view(View view) {
  view.heartbeat_ns = beat(Writer::kDecode);
  view_.publish(view);
}

void SharedPage::publish_offer(Offer offer) {
  offer.heartbeat_ns = beat(Writer::kWorker);
  offer_.publish(offer);
}

void SharedPage::publish_grant(Grant grant) {
  grant.heartbeat_ns = beat(Writer::kDecode);
  pause_epoch_.store(grant.pause_epoch, std::memory_order_release);
  grant_.publish(grant);
}

View SharedPage::read_view() const {
  View view = view_.read();
  view.heartbeat_ns = std::max(view.heartbeat_ns, heartbeat(Writer::kDecode));
  return view;
}

Offer SharedPage::read_offer() const {
  Offer offer = offer_.read();
  offer.heartbeat_ns = std::max(offer.heartbeat_ns, heartbeat(Writer::kWorker));
  return offer;
}

Grant SharedPage::read_grant() const {
  Grant grant = grant_.read();
  grant.heartbeat_ns = std::max(grant.heartbeat_ns, heartbeat(Writer::kDecode));
  return grant;
}

std::int64_t SharedPage::beat(Writer writer) {
  const std::int64_t now = monotonic_ns();
  beat(writer, now);
  return now;
}

void SharedPage::beat(Writer writer, std::int64_t now_ns) {
  lines_[index(writer)].heartbeat_ns.store(now_ns, std::memory_order_release);
}

SharedWord<std::int64_t>& SharedPage::decodes_heartbeat() {
  return lines_[index(Writer::kDecode)].heartbeat_ns;
}

std::int64_t SharedPage::heartbeat_age_ns(Writer writer) const {
  return monotonic_ns() - heartbeat(writer);
}

std::int64_t SharedPage::heartbeat(Writer writer) const {
  return lines_[index(writer)].heartbeat_ns.load(std::memory_order_acquire);
}

std::int64_t SharedPage::add(std::size_t counter, std::int64_t n) {
  require_counter(counter);
  auto& cell = lines_[counter % 2].counters[counter / 2];
  return cell.fetch_add(n, std::memory_order_release) + n;
}

std::int64_t SharedPage::counter(std::size_t counter) const {
  require_counter(counter);
  return lines_[counter % 2].counters[counter / 2].load(std::memory_order_acquire);
}

}  // namespace windrow
