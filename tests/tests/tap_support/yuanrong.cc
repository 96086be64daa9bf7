// The two functions of the client library of Yuanrong's data system that its Python calls, under their own names, with
// functions of the same name beside them: a result is an object, which is empty where all went well.
#include <cstring>
#include <memory>
#include <string>
#include <time.h>
#include <vector>

static void pass_time(long microseconds) {
    timespec time = {0, microseconds * 1000};
    nanosleep(&time, nullptr);
}

namespace datasystem {
struct State { int code; std::string message; };
class Status {
public:
    Status() noexcept = default;
    explicit Status(int code) : state(new State{code, "no"}) {}
    Status(Status &&) noexcept = default;
    ~Status() noexcept = default;
    bool ok() const { return !state; }
private:
    std::unique_ptr<State> state;
};
struct StringView { const char *text; size_t size; };
struct SetParam { int mode; };
struct Buffer { std::string bytes; };
template <typename T> struct Optional { bool is_set = false; T value; };

namespace object_cache {
class ObjectClientImpl {
public:
    virtual Status Set(const std::string &key, const StringView &value, const SetParam &param);
    virtual Status Set(const StringView &value, const SetParam &param, std::string &key);
    virtual Status Get(const std::vector<std::string> &keys, int64_t timeout, std::vector<Optional<Buffer>> &found,
                       bool query, bool shared);
    virtual Status Get(const std::vector<std::string> &keys, int32_t timeout, std::vector<std::shared_ptr<Buffer>> &found,
                       std::vector<std::string> &failed);
    long calls = 0;
};

#define EXPORTED __attribute__((visibility("default")))

EXPORTED Status ObjectClientImpl::Set(const std::string &key, const StringView &value, const SetParam &param) {
    if (value.size == 0) return Status(2 + param.mode);
    pass_time(2000);
    calls += key.size() + value.text[0];
    return {};
}

EXPORTED Status ObjectClientImpl::Set(const StringView &value, const SetParam &param, std::string &key) {
    key = "made-up";
    return Set(key, value, param);
}

EXPORTED Status ObjectClientImpl::Get(const std::vector<std::string> &keys, int64_t timeout,
                                      std::vector<Optional<Buffer>> &found, bool query, bool shared) {
    ++calls;
    if (keys[0].starts_with("missing")) return Status(query + shared + int(timeout));
    pass_time(3000);
    found.resize(keys.size());
    return {};
}

EXPORTED Status ObjectClientImpl::Get(const std::vector<std::string> &keys, int32_t timeout,
                                      std::vector<std::shared_ptr<Buffer>> &found, std::vector<std::string> &failed) {
    failed = keys;
    found.clear();
    return Status(timeout);
}
}
}

using datasystem::object_cache::ObjectClientImpl;

static ObjectClientImpl client;

extern "C" int store_put(const char *key, size_t size) {
    std::string bytes(size, 'x');
    ObjectClientImpl *volatile called = &client;
    return called->Set(key, {bytes.data(), bytes.size()}, {1}).ok() ? 0 : -1;
}

extern "C" int store_get(const char *key) {
    ObjectClientImpl *volatile called = &client;
    std::vector<datasystem::Optional<datasystem::Buffer>> found;
    return called->Get({key}, int64_t(1000), found, true, false).ok();
}
