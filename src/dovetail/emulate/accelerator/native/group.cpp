/* SPDX-License-Identifier: Apache-2.0 */
#include "group.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>

namespace dovetail::emu {

namespace {

using Seconds = std::chrono::duration<double>;

void without_python_lock(const std::function<void()>& function) {
  host_hooks().unlocked ? host_hooks().unlocked(function) : function();
}

// Streams of groups that were destroyed, by device: a process that makes many groups has no more streams than it needs
// at a time.
struct SpareStreams {
  std::mutex guard;
  std::map<int, std::vector<int>> slots;
  int take(int device) {
    {
      std::lock_guard<std::mutex> lock(guard);
      auto& spare = slots[device];
      if (!spare.empty()) {
        int slot = spare.back();
        spare.pop_back();
        return slot;
      }
    }
    return stream_new(device);
  }
  void give(int device, int slot) {
    std::lock_guard<std::mutex> lock(guard);
    slots[device].push_back(slot);
  }
};
SpareStreams& spare_streams() {
  static auto* it = new SpareStreams;
  return *it;
}

// What the thread of a stream does of one operation.
struct Carrier final : Body {
  std::shared_ptr<Wire> wire;
  std::shared_ptr<Watchdog> watchdog;
  std::shared_ptr<Turns> turns;
  std::shared_ptr<Operation> operation;
  std::optional<uint64_t> turn;  // none: only sends and receives
  Claim claim;                   // of all collectives together
  std::vector<std::function<void(Wire&)>> collectives;
  std::vector<Message> messages;
  Channel channel = Channel::pair;

  void run() override {
    c10::InferenceMode quiet;
    bool met = false;
    if (turn) turns->enter(*turn);
    try {
      if (watchdog->working()) carry();
    } catch (const std::exception& error) {
      watchdog->blame(*operation, error);
      met = true;
    }
    if (turn) turns->leave();
    watchdog->finished(*operation);
    if (met && watchdog->ending() != Ending::aborted) throw std::runtime_error(watchdog->line());
  }

  void carry() {
    if (turn) wire->agree(claim);
    for (const auto& collective : collectives) collective(*wire);
    if (channel == Channel::batch)
      wire->exchange(messages);
    else
      for (const auto& message : messages) wire->transfer(message, channel);
  }
};

}  // namespace

GlooFactory& gloo_factory() {
  static auto* it = new GlooFactory;  // never destroyed: it is Python's, which may be gone by then
  return *it;
}

// --- Work ---------------------------------------------------------------------------------------------------------------

GroupWork::GroupWork(int rank, c10d::OpType type, const char* title, const Tensors& inputs)
    : Work(rank, type, title, inputs) {}

bool GroupWork::isCompleted() { return !watchdog->working() || event_query(end); }

bool GroupWork::isSuccess() const { return watchdog->working(); }

std::exception_ptr GroupWork::exception() const {
  try {
    watchdog->check();
    return nullptr;
  } catch (...) {
    return std::current_exception();
  }
}

void GroupWork::synchronize() {
  watchdog->check();
  event_block(end, current_stream(device));
  Tensors freed;  // outside of the lock: tensors may belong to Python
  std::lock_guard<std::mutex> lock(operation->guard);
  freed.swap(operation->stash);
}

bool GroupWork::wait(std::chrono::milliseconds timeout) {
  synchronize();
  try {
    if (timeout != kNoTimeout) {
      if (!event_sync_for(end, Seconds(timeout).count(), "work.wait(timeout)"))
        watchdog->end(Ending::timed_out, operation->told + " did not finish within " + seconds_text(timeout));
    } else if (barrier) {
      stream_sync(current_stream(device), "barrier");
    }
  } catch (const std::exception&) {
    watchdog->check();  // the group's own error, if it is that
    throw;
  }
  watchdog->check();
  return true;
}

void GroupWork::abort() { watchdog->end(Ending::aborted, "the group was aborted"); }

void GroupWork::end_profile() {
  if (recordFunctionEndCallback_) recordFunctionEndCallback_();
}

void Turns::enter(uint64_t turn) {
  std::unique_lock<std::mutex> lock(guard_);
  moved_.wait(lock, [&] { return now_ == turn; });
}

void Turns::leave() {
  std::lock_guard<std::mutex> lock(guard_);
  now_++;
  moved_.notify_all();
}

// --- The group's life -----------------------------------------------------------------------------------------------------

Group::Group(const c10::intrusive_ptr<c10d::Store>& store, c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size,
             c10::intrusive_ptr<Options> options)
    : Backend(rank, size),
      options_(std::move(options)),
      wire_(std::make_shared<Wire>(std::move(gloo), rank, size)),
      watchdog_(std::make_shared<Watchdog>(store, wire_, rank, size)) {}

Group::~Group() {
  watchdog_->end(Ending::aborted, "the group was dropped without destroy_process_group");
  shutdown();
}

void Group::abort() {
  without_python_lock([&] { watchdog_->end(Ending::aborted, "the group was aborted"); });
}

void Group::shutdown() {
  without_python_lock([&] { watchdog_->close(); });
  std::vector<std::shared_ptr<Operation>> freed;
  std::lock_guard<std::mutex> lock(launching_);
  free_finished();
  for (const auto& [key, slot] : streams_) spare_streams().give(key.first, slot);
  streams_.clear();
}

c10d::ErrorType Group::getError() {
  switch (watchdog_->ending()) {
    case Ending::timed_out: return c10d::ErrorType::TIMEOUT;
    case Ending::failed: return c10d::ErrorType::COMM_ERROR;
    case Ending::failed_elsewhere: return c10d::ErrorType::REMOTE_ERROR;
    default: return c10d::ErrorType::SUCCESS;
  }
}

c10::intrusive_ptr<c10d::Backend> Group::split(const c10::intrusive_ptr<c10d::Store>& store,
                                               const std::vector<int>& ranks,
                                               const c10::intrusive_ptr<c10d::Backend::Options>& options) {
  watchdog_->check();
  auto own = std::find(ranks.begin(), ranks.end(), getRank());
  if (own == ranks.end()) return nullptr;
  auto given = c10::dynamic_intrusive_pointer_cast<Options>(options);
  TORCH_CHECK(given, "eccl: expected options of eccl's own");
  auto chosen = c10::make_intrusive<Options>(*given);
  int rank = int(own - ranks.begin()), size = int(ranks.size());
  c10::intrusive_ptr<c10d::Store> below = c10::make_intrusive<c10d::PrefixStore>("eccl", store);
  return c10::make_intrusive<Group>(below, gloo_factory()(below, rank, size, chosen->timeout), rank, size, chosen);
}

// --- Launching ------------------------------------------------------------------------------------------------------------

int Group::device_for(const Call& call) const {
  int device = -1;
  for (const auto* side : {&call.inputs, &call.outputs})
    for (const auto& tensor : *side) {
      if (device < 0) device = tensor.device().index();
      TORCH_CHECK_WITH(ValueError, tensor.device().index() == device, "Expected list of tensors on the same device");
    }
  if (device < 0) device = current_device();
  auto bound = getBoundDeviceId();
  if (bound && bound->type() == c10::kPrivateUse1 && bound->index() != device)
    C10_THROW_ERROR(DistBackendError,
                    "Attempt to perform collective on tensor not on device passed to init_process_group");
  return device;
}

int Group::stream_for(int device, int peer) {
  if (eager_) peer = EVERYBODY;
  auto found = streams_.find({device, peer});
  if (found == streams_.end()) found = streams_.emplace(std::pair(device, peer), spare_streams().take(device)).first;
  return found->second;
}

void Group::follow_current(int device, int slot) {
  int now = current_stream(device);
  if (now == slot) return;
  Event ready;
  event_record(ready, now);
  event_block(ready, slot);
}

void Group::free_finished() {
  // Nobody waited for these: their memory goes back as after record_stream.
  auto finished = [](const std::shared_ptr<Operation>& operation) {
    if (!operation->over) return false;
    Tensors freed;
    std::lock_guard<std::mutex> lock(operation->guard);
    for (const auto& tensor : operation->stash)
      if (tensor.numel()) mem_record(tensor.storage().mutable_data(), operation->slot);
    freed.swap(operation->stash);
    return true;
  };
  stashes_.erase(std::remove_if(stashes_.begin(), stashes_.end(), finished), stashes_.end());
}

c10::intrusive_ptr<GroupWork> Group::submit(Call call) {
  watchdog_->check();
  int device = device_for(call);
  c10::DeviceGuard guard(device_of(device));
  std::unique_lock<std::mutex> lock(launching_, std::defer_lock);
  without_python_lock([&] { lock.lock(); });
  int slot = call.async ? stream_for(device, call.message && !coalescing_ ? call.message->peer : EVERYBODY)
                        : current_stream(device);
  follow_current(device, slot);
  if (coalescing_) {
    if (!batch_.empty())
      TORCH_CHECK_WITH(ValueError, device_for(batch_[0]) == device, "Expected list of tensors on the same device");
    batch_.push_back(std::move(call));
    return nullptr;
  }
  bool async = call.async;
  auto type = call.type;
  auto timeout = call.timeout;
  return launch({std::move(call)}, type, device, slot, async, timeout);
}

c10::intrusive_ptr<GroupWork> Group::submit(std::vector<Call> calls, c10d::OpType type, bool async,
                                            std::chrono::milliseconds timeout) {
  watchdog_->check();
  TORCH_CHECK_WITH(ValueError, !calls.empty(), "Tensor list must be nonempty");
  int device = device_for(calls[0]);
  for (const auto& call : calls)
    TORCH_CHECK_WITH(ValueError, device_for(call) == device, "Expected list of tensors on the same device");
  c10::DeviceGuard guard(device_of(device));
  std::unique_lock<std::mutex> lock(launching_, std::defer_lock);
  without_python_lock([&] { lock.lock(); });
  int slot = async ? stream_for(device, EVERYBODY) : current_stream(device);
  follow_current(device, slot);
  return launch(calls, type, device, slot, async, timeout);
}

c10::intrusive_ptr<GroupWork> Group::launch(const std::vector<Call>& calls, c10d::OpType type, int device, int slot,
                                            bool async, std::chrono::milliseconds timeout) {
  free_finished();
  auto carrier = std::make_unique<Carrier>();
  auto operation = std::make_shared<Operation>();
  Tensors inputs, outputs;
  std::vector<Range> ranges;
  std::string told;
  for (const auto& call : calls) {
    told += (told.empty() ? "" : " and ") + call.claim.told;
    for (const auto& tensor : call.inputs) ranges.push_back(range(tensor, false));
    for (const auto& tensor : call.outputs) ranges.push_back(range(tensor, true));
    inputs.insert(inputs.end(), call.inputs.begin(), call.inputs.end());
    outputs.insert(outputs.end(), call.outputs.begin(), call.outputs.end());
    if (call.message) {
      carrier->messages.push_back(*call.message);
    } else {
      carrier->claim.key += call.claim.key + ";";
      carrier->collectives.push_back(call.carry);
    }
  }
  bool collective = !carrier->collectives.empty();
  uint64_t number = (collective ? collectives_ : messages_) + 1;
  told += (collective ? ", collective " : ", point-to-point operation ") + std::to_string(number);
  if (timeout == c10d::kUnsetTimeout) timeout = options_->timeout;
  operation->told = told;
  operation->timeout = timeout;
  operation->deadline = std::chrono::steady_clock::now() + timeout;
  operation->slot = slot;
  carrier->claim.told = told;
  for (auto& message : carrier->messages) message.claim.told += ", point-to-point operation " + std::to_string(number);
  carrier->wire = wire_;
  carrier->watchdog = watchdog_;
  carrier->turns = turns_;
  carrier->operation = operation;
  if (collective) carrier->turn = next_turn_;
  carrier->channel = coalescing_ ? Channel::batch : Channel::pair;

  auto& what = kernel(std::string(BACKEND_NAME) + ":" + (calls.size() == 1 ? calls[0].name : "coalesced"));
  auto work = c10::make_intrusive<GroupWork>(getRank(), type, what.name.c_str(), inputs);
  enqueue(slot, what, ranges, std::move(carrier));  // throws where it races: then nothing below has happened
  if (collective) next_turn_++;
  (collective ? collectives_ : messages_) = number;
  event_record(work->end, slot);
  watchdog_->watch(operation);
  if (async) {
    operation->stash = inputs;
    operation->stash.insert(operation->stash.end(), outputs.begin(), outputs.end());
    stashes_.push_back(operation);
  }
  work->device = device;
  work->number = number;
  work->outputs = type == c10d::OpType::SEND ? inputs : outputs;
  work->operation = operation;
  work->watchdog = watchdog_;
  {
    c10::OptionalStreamGuard on(stream_of(slot));
    work->future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                            std::vector<c10::Device>{device_of(device)});
    work->future->markCompleted(at::IValue(work->outputs));
  }
  work->end_profile();
  return work;
}

void Group::startCoalescing() {
  std::lock_guard<std::mutex> lock(launching_);
  batch_.clear();
  coalescing_ = true;
}

c10::intrusive_ptr<c10d::Work> Group::endCoalescing() {
  std::unique_lock<std::mutex> lock(launching_, std::defer_lock);
  without_python_lock([&] { lock.lock(); });
  TORCH_CHECK(coalescing_, "Something went wrong. Did you call end_coalescing before start_coalescing?");
  auto calls = std::move(batch_);
  batch_.clear();
  if (calls.empty()) {
    coalescing_ = false;
    return nullptr;
  }
  bool async = std::any_of(calls.begin(), calls.end(), [](const Call& call) { return call.async; });
  int device = device_for(calls[0]);
  c10::DeviceGuard guard(device_of(device));
  int slot = async ? stream_for(device, EVERYBODY) : current_stream(device);
  c10::intrusive_ptr<GroupWork> work;
  try {
    work = launch(calls, c10d::OpType::COALESCED, device, slot, async, c10d::kUnsetTimeout);
  } catch (...) {
    coalescing_ = false;
    throw;
  }
  coalescing_ = false;
  return async ? work : nullptr;
}

}  // namespace dovetail::emu
